/* Expert arithmetic on the CPU: what the files of this folder share.
 *
 * The weights of an expert are rows of numbers in one of five formats (`formats.py` describes them). One row times one
 * column of activations is summed in 16 lanes, which are added by halves at the end: so a product does not depend on
 * the instruction set, on the number of threads, or on how many columns are computed with it.
 *
 * Plain numbers: column j goes to lane j % 16 by one fused multiply-add. Groups of 32: the activations are signed bytes
 * with a float scale for each group as well; lane l of eight takes the integer sum of the four products 4l..4l+3 times
 * both scales; even groups use lanes 0-7, odd groups lanes 8-15.
 */
#ifndef SPAC_KERNELS_H
#define SPAC_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { F32, BF16, F16, Q8, Q4 };
enum { GROUP = 32, LANES = 16, Q8_BYTES = 34, Q4_BYTES = 18 };
enum { UP = 1, GATE = 2, DOWN = 4 };

/* Nanoseconds since some moment. */
static inline int64_t spac_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline uint32_t spac_bits(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static inline float spac_float(uint32_t b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

static inline float spac_of_bfloat(uint16_t h) { return spac_float((uint32_t)h << 16); }

/* Subnormals are made normal by the product with a power of two. */
static inline float spac_of_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if (rest >= 0x7c00u << 13) return spac_float(sign | 0x7f800000u | rest); /* infinite or not a number */
    const float x = spac_float(rest) * 5.192296858534828e33f;                /* 2^112 */
    return sign ? -x : x;
}

/* A column of activations for groups: per group 32 bytes, the eight sums of four times what takes off that numbers are
 * stored too high (4-bit ones by 8), and the scale. All bytes of the column come first, then all sums, then all scales.
 */
static inline size_t column_bytes(int n) { return (size_t)n + (size_t)n / GROUP * (8 * sizeof(int32_t) + sizeof(float)); }
static inline int32_t *column_sums(void *c, int n) { return (int32_t *)((char *)c + n); }
static inline float *column_scales(void *c, int n) { return (float *)((char *)c + 2 * (size_t)n); }

/* All lanes, added by halves; what is in them is lost. */
static inline float spac_sum(float *lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* n, filled up to whole lanes. */
static inline int whole(int n) { return (n + LANES - 1) / LANES * LANES; }

/* What an instruction set provides. */
typedef struct {
    const char *name;
    /* y[j][r] = row r of w times column x[j]; x are floats, or columns as above where the format has groups. */
    void (*product)(int format, const uint8_t *w, size_t row_bytes, int rows, int columns, const void *const *x,
                    float *const *y, int m);
    /* Groups first..last of a column of n numbers. */
    void (*quantise)(int format, const float *x, void *column, int n, int first, int last);
    /* gate[i] = silu(gate[i]) * up[i]. */
    void (*gate)(float *gate, const float *up, int n);
    /* out [heads, width]: attention of query heads [heads, width] that share n keys and values, which are `stride` floats
     * apart; width is a multiple of LANES. scores: room for heads * whole(n). */
    void (*attend)(const float *queries, int heads, const float *keys, const float *values, size_t stride, int n,
                   int width, float scale, float *scores, float *out);
} Isa;

extern const Isa spac_scalar;
#if defined(__x86_64__)
extern const Isa spac_avx2, spac_avx512;
#endif

/* The best one that this processor has for "", else the one of that name; NULL if it has not. */
const Isa *spac_isa(const char *name);

#endif
