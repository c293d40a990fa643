/* Products of some rows with some columns at once, written over what an instruction set defines before it includes this:
 *
 *   V, zero(), fma16(a, b, c), sum16(a)     16 floats in the lanes of kernels.h
 *   load16(format, p), columns16(x)         16 plain weights; 16 activations
 *   S, scales8(format, blocks, n)            the scales of n <= 8 groups of a row
 *   P, times8(format, s, x, n)               the same times those of a column
 *   spread2(format, p, i)                    that of group i in lanes 0-7, of group i + 1 in lanes 8-15
 *   groups2(format, w, x, sums, two)         the integer sums of a group, and of the next one if `two`, as floats
 *   LOW(format), HIGH(format)                factors of a column's sums: of numbers 0-15 and of 16-31
 *   STRIPS                                   strips, or singly
 *   ALONE(format)                            rows at once for a single column
 *   ROWS, WIDE                               rows, and most columns, of plain numbers at once: up to 4 and 3 to 6
 */
#include "plain.h"

#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 8")

enum { AHEAD = 4096 };

/* Ask for `bytes` from AHEAD after p on, which are read when the tile after this one is or the next. Lines come in the
 * order of their addresses, as the processor's own prefetcher expects, while the rows of a tile lie in different pages.
 * They go to the second cache: the first can wait for too few lines at once to keep memory busy. */
INLINE void ahead(const uint8_t *p, size_t bytes) {
    UNROLL for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + AHEAD + at, 0, 2);
}

INLINE size_t number_bytes(int format) { return format == F32 ? 4 : 2; }

/* R rows, C columns of plain numbers. */
INLINE void plain_tile(int format, int R, int C, const uint8_t *w, size_t row_bytes, int n, const float *const *x,
                       float *const *y, int row) {
    const size_t size = number_bytes(format);
    const int whole = n / LANES * LANES;
    V sum[4][6];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = zero();
    for (int j = 0; j < whole; j += LANES) {
        V weights[4];
        ahead(w + R * row_bytes + R * j * size, R * LANES * size);
        UNROLL for (int r = 0; r < R; r++) weights[r] = load16(format, w + r * row_bytes + j * size);
        UNROLL for (int c = 0; c < C; c++) {
            V column = columns16(x[c] + j);
            UNROLL for (int r = 0; r < R; r++) sum[r][c] = fma16(weights[r], column, sum[r][c]);
        }
    }
    if (whole < n) {
        for (int r = 0; r < R; r++) {
            uint8_t rest[LANES * 4] = {0};
            memcpy(rest, w + r * row_bytes + whole * size, (n - whole) * size);
            for (int c = 0; c < C; c++) {
                float column[LANES] = {0};
                memcpy(column, x[c] + whole, (n - whole) * sizeof(float));
                sum[r][c] = fma16(load16(format, rest), columns16(column), sum[r][c]);
            }
        }
    }
    UNROLL for (int c = 0; c < C; c++) UNROLL for (int r = 0; r < R; r++) y[c][row + r] = sum16(sum[r][c]);
}

/* Groups g and g + 1 (that one if `two`) of every row and column; scale: theirs. */
INLINE void two_groups(int format, int R, int C, const uint8_t *w, size_t row_bytes, int n, int g, int two,
                       const void *const *x, const P scale[4][4], int at, V sum[4][4]) {
    const size_t bytes = format == Q8 ? Q8_BYTES : Q4_BYTES;
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int c = 0; c < C; c++) {
            const int8_t *column = (const int8_t *)x[c] + g * GROUP;
            const int32_t *sums = column_sums((void *)x[c], n) + g * 8;
            V dot = groups2(format, w + r * row_bytes + g * bytes + 2, column, sums, two);
            sum[r][c] = fma16(dot, spread2(format, scale[r][c], at), sum[r][c]);
        }
    }
}

/* `count` groups from g on: 8, or less at a row's end. */
INLINE void eight_groups(int format, int R, int C, const uint8_t *w, size_t row_bytes, int n, int g, int count,
                         const void *const *x, V sum[4][4]) {
    const size_t bytes = format == Q8 ? Q8_BYTES : Q4_BYTES;
    P scale[4][4];
    UNROLL for (int r = 0; r < R; r++) {
        S of_row = scales8(format, w + r * row_bytes + g * bytes, count);
        UNROLL for (int c = 0; c < C; c++) scale[r][c] = times8(format, of_row, column_scales((void *)x[c], n) + g, count);
    }
    if (count == 8) {
        UNROLL for (int i = 0; i < 8; i += 2) two_groups(format, R, C, w, row_bytes, n, g + i, 1, x, scale, i, sum);
        return;
    }
    for (int i = 0; i < count; i += 2)
        two_groups(format, R, C, w, row_bytes, n, g + i, i + 1 < count, x, scale, i, sum);
}

INLINE void group_tile(int format, int R, int C, const uint8_t *w, size_t row_bytes, int n, const void *const *x,
                       float *const *y, int row) {
    const int groups = n / GROUP, whole = groups / 8 * 8;
    V sum[4][4];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = zero();
    for (int g = 0; g < whole; g += 8) {
        const size_t bytes = (size_t)R * (format == Q8 ? Q8_BYTES : Q4_BYTES);
        ahead(w + R * row_bytes + g * bytes, 8 * bytes);
        eight_groups(format, R, C, w, row_bytes, n, g, 8, x, sum);
    }
    if (whole < groups) eight_groups(format, R, C, w, row_bytes, n, whole, groups - whole, x, sum);
    UNROLL for (int c = 0; c < C; c++) UNROLL for (int r = 0; r < R; r++) y[c][row + r] = sum16(sum[r][c]);
}

INLINE void tile(int format, int R, int C, const uint8_t *w, size_t row_bytes, int n, const void *const *x,
                 float *const *y, int row) {
    if (format == Q8 || format == Q4)
        group_tile(format, R, C, w, row_bytes, n, x, y, row);
    else
        plain_tile(format, R, C, w, row_bytes, n, (const float *const *)x, y, row);
}

static __attribute__((noinline)) void one(int format, const uint8_t *w, int n, const void *const *x, float *const *y,
                                          int row) {
    switch (format) {
    case F32: tile(F32, 1, 1, w, 0, n, x, y, row); break;
    case BF16: tile(BF16, 1, 1, w, 0, n, x, y, row); break;
    case F16: tile(F16, 1, 1, w, 0, n, x, y, row); break;
    case Q8: tile(Q8, 1, 1, w, 0, n, x, y, row); break;
    case Q4: tile(Q4, 1, 1, w, 0, n, x, y, row); break;
    }
}

/* C columns, R rows at a time; what is left over is computed with rows that have been before, or singly. */
INLINE void strip(int format, int R, int C, const uint8_t *w, size_t row_bytes, int rows, int n, const void *const *x,
                  float *const *y) {
    if (rows < R) {
        for (int row = 0; row < rows; row++)
            for (int c = 0; c < C; c++) one(format, w + row * row_bytes, n, x + c, y + c, row);
        return;
    }
    for (int row = 0; row < rows; row += R) {
        if (row + R > rows) row = rows - R;
        tile(format, R, C, w + row * row_bytes, row_bytes, n, x, y, row);
    }
}

INLINE void strips(int format, const uint8_t *w, size_t row_bytes, int rows, int n, const void *const *x,
                   float *const *y, int m) {
    const int grouped = format == Q8 || format == Q4, most = grouped ? 4 : WIDE;
    while (m > 0) {
        /* As few times as can be, and plain numbers evenly: 4 columns are 2 and 2, not 3 and 1. */
        const int times = (m + most - 1) / most, c = grouped ? (m < most ? m : most) : (m + times - 1) / times;
        if (c == 6 && WIDE >= 6) strip(format, ROWS, 6, w, row_bytes, rows, n, x, y);
        if (c == 5 && WIDE >= 5) strip(format, ROWS, 5, w, row_bytes, rows, n, x, y);
        if (c == 4 && (grouped || WIDE >= 4)) strip(format, grouped ? 1 : ROWS, 4, w, row_bytes, rows, n, x, y);
        if (c == 3) strip(format, grouped ? 1 : ROWS, 3, w, row_bytes, rows, n, x, y);
        if (c == 2) strip(format, grouped ? 2 : ROWS, 2, w, row_bytes, rows, n, x, y);
        if (c == 1) strip(format, ALONE(format), 1, w, row_bytes, rows, n, x, y);
        x += c, y += c, m -= c;
    }
}

/* Row by row and column by column, where registers for more are not to be had. */
INLINE void singly(int format, const uint8_t *w, size_t row_bytes, int rows, int n, const void *const *x,
                   float *const *y, int m) {
    for (int j = 0; j < m; j++)
        for (int row = 0; row < rows; row++) one(format, w + row * row_bytes, n, x + j, y + j, row);
}

static void product(int format, const uint8_t *w, size_t row_bytes, int rows, int columns, const void *const *x,
                    float *const *y, int m) {
    switch (format) {
    case F32: STRIPS(F32, w, row_bytes, rows, columns, x, y, m); break;
    case BF16: STRIPS(BF16, w, row_bytes, rows, columns, x, y, m); break;
    case F16: STRIPS(F16, w, row_bytes, rows, columns, x, y, m); break;
    case Q8: STRIPS(Q8, w, row_bytes, rows, columns, x, y, m); break;
    case Q4: STRIPS(Q4, w, row_bytes, rows, columns, x, y, m); break;
    }
}
