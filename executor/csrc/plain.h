/* Activations in plain C; the compiler makes vectors of it for each instruction set, and no step of it may be fused or
 * reordered (-ffp-contract=off, no fast-math), so that the results are the same bits everywhere. */
#include "kernels.h"

static const float ROUND = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest whole number, ties to even */

enum { NOTHING = 0x15f79688 }; /* 1e-25f */

/* Per group the largest magnitude becomes 127. Not-a-numbers become the scale's. Groups below 1e-25 are nothing, so that
 * no scale is so small that a sixteenth of it is rounded. */
static void quantise(int format, const float *x, void *column, int n, int first, int last) {
    (void)format; /* some have factors that do not ask */
    for (int g = first; g < last; g++) {
        const float *from = x + g * GROUP;
        int8_t *to = (int8_t *)column + g * GROUP;
        int32_t *sums = column_sums(column, n) + g * 8;
        uint32_t most = 0;
        for (int i = 0; i < GROUP; i++) {
            uint32_t b = spac_bits(from[i]) & 0x7fffffffu;
            most = b > most ? b : most;
        }
        float largest = most < NOTHING ? 0.0f : spac_float(most), inverse = largest > 0 ? 127.0f / largest : 0.0f;
        int32_t q[GROUP];
        for (int i = 0; i < GROUP; i++) q[i] = (int32_t)(spac_bits(from[i] * inverse + ROUND) - spac_bits(ROUND));
        for (int i = 0; i < GROUP; i++) to[i] = (int8_t)q[i];
        for (int i = 0; i < 8; i++) {
            const int8_t *four = to + 4 * i;
            sums[i] = (i < 4 ? LOW(format) : HIGH(format)) * (four[0] + four[1] + four[2] + four[3]);
        }
        column_scales(column, n)[g] = largest / 127.0f;
    }
}

/* e^x within 2 units in the last place for -87 <= x <= 88, beyond which x is held: 2^n e^r, |r| <= ln(2) / 2, by the
 * polynomial of the Cephes library's expf. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * spac_float((spac_bits(shifted) - spac_bits(ROUND) + 127u) << 23);
}

static void gate(float *restrict gate, const float *restrict up, int n) {
    for (int i = 0; i < n; i++) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}
