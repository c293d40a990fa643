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

static inline void times8(S s, const float *x, int n, float *out) {
    __m256 some = _mm256_maskz_loadu_ps((__mmask8)((1u << n) - 1), x);
    _mm256_storeu_ps(out, _mm256_mul_ps(s, some));
}

static inline __m512i two_of(__m256i lo, __m256i hi) { return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1); }

static inline V groups2(int format, const uint8_t *w, const int8_t *x, const int32_t *sums, int two) {
    const __m256i nothing = _mm256_setzero_si256();
    __m512i column = two ? _mm512_loadu_si512(x) : two_of(load32(x), nothing);
    if (format == Q8) {
        __m512i q = two_of(load32(w), two ? load32(w + Q8_BYTES) : nothing);
        __m512i signed_by = _mm512_mask_sub_epi8(column, _mm512_movepi8_mask(q), _mm512_setzero_si512(), column);
        return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_abs_epi8(q), signed_by));
    }
    __m512i q = two_of(halves(w), two ? halves(w + Q4_BYTES) : nothing);
    __m512i low = two ? _mm512_loadu_si512(sums) : two_of(load32(sums), nothing);
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(low, _mm512_and_si512(q, _mm512_set1_epi8(15)), column));
}

static inline V spread2(const float *s) {
    return _mm512_insertf32x8(_mm512_set1_ps(s[0]), _mm256_broadcast_ss(s + 1), 1);
}

#define STRIPS strips
#include "tiles.h"

const Isa spac_avx512 = {"avx512", product, quantise, gate};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
