/* Attention over a cache, written as tiles.h is over what an instruction set defines, with store16(p, a) and all16(x). Every
 * sum has an order of its own, so results are the same on all sets and for any number of rows. */
enum { TILE = 64 }; /* positions whose values stay in the first cache while all heads take them */

/* Scores of n positions to weights that add up to 1; what fills up the lanes becomes 0. */
static void softmax(float *restrict scores, int n) {
    float most[LANES], sum[LANES] = {0};
    for (int i = n; i < whole(n); i++) scores[i] = scores[0];
    for (int j = 0; j < LANES; j++) most[j] = scores[0];
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) most[j] = scores[i + j] > most[j] ? scores[i + j] : most[j];
    for (int j = 1; j < LANES; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
    for (int i = 0; i < whole(n); i++) scores[i] = exponential(scores[i] - most[0]);
    for (int i = n; i < whole(n); i++) scores[i] = 0;
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) sum[j] += scores[i + j];
    const float part = 1.0f / spac_sum(sum);
    for (int i = 0; i < whole(n); i++) scores[i] *= part;
}

/* K registers of one head's result take the weighted values of n positions. */
INLINE void gather(int K, const float *weights, const float *values, size_t stride, int n, float *out) {
    V sum[4];
    UNROLL for (int k = 0; k < K; k++) sum[k] = columns16(out + k * LANES);
    for (int t = 0; t < n; t++) {
        V weight = all16(weights[t]);
        UNROLL for (int k = 0; k < K; k++) sum[k] = fma16(weight, columns16(values + t * stride + k * LANES), sum[k]);
    }
    UNROLL for (int k = 0; k < K; k++) store16(out + k * LANES, sum[k]);
}

static void attend(const float *queries, int heads, const float *keys, const float *values, size_t stride, int n, int width,
                   float scale, float *scores, float *out) {
    const int row = whole(n);
    for (int t = 0; t < n; t++) {
        for (int g = 0; g < heads; g++) {
            V sum = zero();
            for (int j = 0; j < width; j += LANES)
                sum = fma16(columns16(queries + g * width + j), columns16(keys + t * stride + j), sum);
            scores[g * row + t] = sum16(sum) * scale;
        }
    }
    for (int g = 0; g < heads; g++) softmax(scores + g * row, n);
    memset(out, 0, (size_t)heads * width * sizeof(float));
    for (int t = 0; t < n; t += TILE) {
        const int some = n - t < TILE ? n - t : TILE;
        for (int g = 0; g < heads; g++) {
            int j = 0;
            for (; j + 4 * LANES <= width; j += 4 * LANES)
                gather(4, scores + g * row + t, values + t * stride + j, stride, some, out + g * width + j);
            for (; j < width; j += LANES)
                gather(1, scores + g * row + t, values + t * stride + j, stride, some, out + g * width + j);
        }
    }
}
