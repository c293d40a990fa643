/* The lanes as plain arrays: any processor, and the specification that the others are held to. */
#include "kernels.h"

typedef struct { float v[LANES]; } V;
typedef struct { float v[8]; } S;

static inline V zero(void) { return (V){{0}}; }

static inline V fma16(V a, V b, V c) {
    for (int i = 0; i < LANES; i++) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}

static inline float sum16(V a) { return spac_sum(a.v); }

static inline V load16(int format, const uint8_t *p) {
    V a;
    if (format == F32) {
        memcpy(&a, p, sizeof a);
        return a;
    }
    for (int i = 0; i < LANES; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        a.v[i] = format == BF16 ? spac_of_bfloat(h) : spac_of_half(h);
    }
    return a;
}

static inline V columns16(const float *x) {
    V a;
    memcpy(&a, x, sizeof a);
    return a;
}

static inline void store16(float *p, V a) { memcpy(p, &a, sizeof a); }

static inline V all16(float x) {
    V a;
    for (int i = 0; i < LANES; i++) a.v[i] = x;
    return a;
}

#define LOW(format) 0 /* the sums are for vectors */
#define HIGH(format) 0

static inline S scales8(int format, const uint8_t *block, int n) {
    const size_t bytes = format == Q8 ? Q8_BYTES : Q4_BYTES;
    S s = {{0}};
    for (int i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, block + i * bytes, 2);
        s.v[i] = spac_of_half(h);
    }
    return s;
}

typedef S P;

static inline P times8(int format, S s, const float *x, int n) {
    (void)format;
    for (int i = 0; i < n; i++) s.v[i] *= x[i];
    return s;
}

static inline V groups2(int format, const uint8_t *w, const int8_t *x, const int32_t *sums, int two) {
    V a = {{0}};
    for (int half = 0; half <= two; half++) {
        for (int i = 0; i < GROUP; i++) {
            int32_t q = format == Q8 ? (int8_t)w[i] : (i < 16 ? w[i] & 15 : w[i - 16] >> 4) - 8;
            a.v[half * 8 + i / 4] += (float)(q * x[i]); /* whole numbers below 2^24: exact */
        }
        w += format == Q8 ? Q8_BYTES : Q4_BYTES, x += GROUP;
    }
    (void)sums;
    return a;
}

static inline V spread2(int format, P s, int at) {
    V a;
    (void)format;
    for (int i = 0; i < LANES; i++) a.v[i] = s.v[at + i / 8];
    return a;
}

#define STRIPS singly
#define ROWS 2
#define WIDE 3
#define ALONE(format) 1
#include "tiles.h"
#include "attend.h"

const Isa spac_scalar = {"scalar", product, quantise, gate, attend};
