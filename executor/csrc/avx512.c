/* AVX-512 (F, BW, VL, VNNI): one register of sixteen lanes. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

#include "x86.h"

typedef __m512 V;

static inline V zero(void) { return _mm512_setzero_ps(); }

static inline V fma16(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }

static inline float sum16(V a) {
    return sum8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}

static inline V load16(int format, const uint8_t *p) {
    if (format == F32) return _mm512_loadu_ps(p);
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    if (format == F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

static inline V columns16(const float *x) { return _mm512_loadu_ps(x); }

static inline void store16(float *p, V a) { _mm512_storeu_ps(p, a); }

static inline V all16(float x) { return _mm512_set1_ps(x); }

typedef __m256 S;
typedef __m512 P; /* Q4: in the upper half a sixteenth of the lower half */

static inline S scales8(int format, const uint8_t *block, int n) {
    if (n < 8 || format == Q8) return scales_singly(format, block, n);
    /* The eighth ends with byte 127. */
    const __m512i at = _mm512_castsi128_si512(_mm_setr_epi16(0, 9, 18, 27, 36, 45, 54, 63));
    __m512i halves = _mm512_permutex2var_epi16(_mm512_loadu_si512(block), at, _mm512_loadu_si512(block + 64));
    return _mm256_cvtph_ps(_mm512_castsi512_si128(halves));
}

static inline P times8(int format, S s, const float *x, int n) {
    __m256 p = _mm256_mul_ps(s, n == 8 ? _mm256_loadu_ps(x) : _mm256_maskz_loadu_ps((__mmask8)((1u << n) - 1), x));
    __m512 both = _mm512_castps256_ps512(p);
    return format == Q8 ? both : _mm512_insertf32x8(both, _mm256_mul_ps(p, _mm256_set1_ps(0.0625f)), 1);
}

/* Q4: numbers 16-31 of a group stay in the upper halves of their bytes, 16 times too large. Q8: bytes are made unsigned
 * by adding 128. The sums take off what is too much. */
#define LOW(format) ((format) == Q8 ? -128 : -8)
#define HIGH(format) -128

static inline V groups2(int format, const uint8_t *w, const int8_t *x, const int32_t *sums, int two) {
    __m512i column = two ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi32(0xff, x);
    __m512i less = two ? _mm512_loadu_si512(sums) : _mm512_maskz_loadu_epi32(0xff, sums), q;
    if (format == Q8) {
        q = _mm512_castsi256_si512(load32(w));
        if (two) q = _mm512_inserti64x4(q, load32(w + Q8_BYTES), 1);
        q = _mm512_xor_si512(q, _mm512_set1_epi8(-128));
    } else {
        const __m128i low = _mm_set1_epi8(15), high = _mm_set1_epi8(-16);
        const __m512i own = _mm512_broadcast_i64x4(_mm256_setr_m128i(low, high));
        q = _mm512_broadcast_i32x4(load_16(w));
        if (two) q = _mm512_mask_broadcast_i32x4(q, 0xff00, load_16(w + Q4_BYTES));
        q = _mm512_and_si512(q, own);
    }
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(less, q, column));
}

static inline V spread2(int format, P p, int i) {
    const int j = format == Q8 ? i : i + 8, k = i + 1, l = j + 1;
    return _mm512_permutexvar_ps(_mm512_setr_epi32(i, i, i, i, j, j, j, j, k, k, k, k, l, l, l, l), p);
}

#define STRIPS strips
#define ROWS 4
#define WIDE 6
#define ALONE(format) ((format) == F32 ? 4 : (format) == Q4 ? 2 : 1)
#include "tiles.h"
#include "attend.h"

const Isa spac_avx512 = {"avx512", product, quantise, gate, attend};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
