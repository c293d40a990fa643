/* What both vector sets of x86-64 use; included with the instruction set chosen. */
#include <immintrin.h>

#include "kernels.h"

/* Lanes 8-15 have been added to lanes 0-7. */
static inline float sum8(__m256 eight) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline __m128i load_16(const void *p) { return _mm_loadu_si128((const __m128i *)p); }

static inline __m256i load32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

static inline uint16_t half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

/* The scales of n <= 8 groups of a row, read one by one. */
static inline __m256 scales_singly(int format, const uint8_t *block, int n) {
    const size_t bytes = format == Q8 ? Q8_BYTES : Q4_BYTES;
    if (n == 8) {
        __m128i h = _mm_cvtsi32_si128(half_at(block));
        h = _mm_insert_epi16(h, half_at(block + bytes), 1);
        h = _mm_insert_epi16(h, half_at(block + 2 * bytes), 2);
        h = _mm_insert_epi16(h, half_at(block + 3 * bytes), 3);
        h = _mm_insert_epi16(h, half_at(block + 4 * bytes), 4);
        h = _mm_insert_epi16(h, half_at(block + 5 * bytes), 5);
        h = _mm_insert_epi16(h, half_at(block + 6 * bytes), 6);
        h = _mm_insert_epi16(h, half_at(block + 7 * bytes), 7);
        return _mm256_cvtph_ps(h);
    }
    uint16_t some[8] = {0};
    for (int i = 0; i < (n & 7); i++) some[i] = half_at(block + i * bytes);
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)some));
}
