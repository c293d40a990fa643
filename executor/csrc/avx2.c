/* AVX2 with FMA and F16C: two registers of eight lanes. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "x86.h"

typedef struct { __m256 lo, hi; } V;

static inline V zero(void) { return (V){_mm256_setzero_ps(), _mm256_setzero_ps()}; }

static inline V fma16(V a, V b, V c) { return (V){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }

static inline float sum16(V a) { return sum8(_mm256_add_ps(a.lo, a.hi)); }

static inline __m256 load8(int format, const uint8_t *p) {
    if (format == F32) return _mm256_loadu_ps((const float *)p);
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    if (format == F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

static inline V load16(int format, const uint8_t *p) {
    return (V){load8(format, p), load8(format, p + (format == F32 ? 32 : 16))};
}

static inline V columns16(const float *x) { return (V){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }

static inline void store16(float *p, V a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }

static inline V all16(float x) { return (V){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

typedef __m256 S;
typedef struct { float v[8]; } P; /* in memory, from where one number fills a register at no cost */

static inline S scales8(int format, const uint8_t *block, int n) { return scales_singly(format, block, n); }

static inline P times8(int format, S s, const float *x, int n) {
    P p;
    float some[8] = {0};
    (void)format;
    if (n < 8) x = memcpy(some, x, (size_t)n * sizeof(float));
    _mm256_storeu_ps(p.v, _mm256_mul_ps(s, _mm256_loadu_ps(x)));
    return p;
}

#define LOW(format) -8
#define HIGH(format) -8

/* 32 numbers of 4 bits, still with others in the upper halves of their bytes. */
static inline __m256i halves(const uint8_t *w) {
    __m256i both = _mm256_broadcastsi128_si256(load_16(w));
    return _mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4));
}

/* Eight sums of four products. Both factors of maddubs stay below 128 * 127 * 2 < 2^15. */
static inline __m256 group(int format, const uint8_t *w, const int8_t *x, const int32_t *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (format == Q8) {
        __m256i q = load32(w), a = load32(x);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(a, q));
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
    }
    __m256i q = _mm256_and_si256(halves(w), _mm256_set1_epi8(15));
    __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(q, load32(x)), ones);
    return _mm256_cvtepi32_ps(_mm256_add_epi32(fours, load32(sums)));
}

static inline V groups2(int format, const uint8_t *w, const int8_t *x, const int32_t *sums, int two) {
    const size_t bytes = format == Q8 ? Q8_BYTES : Q4_BYTES;
    return (V){group(format, w, x, sums), two ? group(format, w + bytes, x + GROUP, sums + 8) : _mm256_setzero_ps()};
}

static inline V spread2(int format, P s, int i) {
    (void)format;
    return (V){_mm256_broadcast_ss(s.v + i), _mm256_broadcast_ss(s.v + i + 1)};
}

#define STRIPS strips
#define ROWS 2
#define WIDE 3
#define ALONE(format) 2
#include "tiles.h"
#include "attend.h"

const Isa spac_avx2 = {"avx2", product, quantise, gate, attend};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
