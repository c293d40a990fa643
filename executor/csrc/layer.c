/* The expert work of one layer in one call: every expert's rows are cut into pieces that threads take in turn.
 *
 * Pieces come in the order up(0), up(1), down(0), up(2), down(1), ... so that what down(e) waits for has been over for a
 * whole expert when a thread comes to it. Each product is made by one thread in an order of its own (kernels.h), so the
 * result does not depend on the threads.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "layer.h"
#include "pool.h"

enum { PIECE_BYTES = 262144, PIECE_ROWS = 8 };

typedef struct { int32_t expert, down, row, rows; } Piece;

typedef struct {
    const Layer *layer;
    const Isa *isa;
    size_t up_bytes, down_bytes;  /* of a row */
    Piece *pieces;
    int n_pieces;
    int *first;                   /* [experts + 1] index of an expert's first token */
    const void **up_x, **down_x;  /* [tokens of all] columns */
    float **up_y, **down_y;
    atomic_int next, took_part, *left; /* left: [experts] pieces of up */
    _Atomic int64_t *busy;        /* [experts] */
} Work;

static int grouped(int format) { return format == Q8 || format == Q4; }

static size_t row_bytes(int format, int columns) {
    switch (format) {
    case F32: return (size_t)columns * 4;
    case Q8: return (size_t)columns / GROUP * Q8_BYTES;
    case Q4: return (size_t)columns / GROUP * Q4_BYTES;
    default: return (size_t)columns * 2;
    }
}

static float number(int format, const uint8_t *p, int i) {
    if (format == F32) {
        float x;
        memcpy(&x, p + 4 * (size_t)i, 4);
        return x;
    }
    uint16_t h;
    memcpy(&h, p + 2 * (size_t)i, 2);
    return format == BF16 ? spac_of_bfloat(h) : spac_of_half(h);
}

static void add_bias(const Layer *l, const uint8_t *bias, float *y, int row, int rows) {
    for (int r = row; r < row + rows; r++) y[r] += number(l->bias, bias, r);
}

/* y[j][row..row + rows) for all tokens of an expert. */
static void product(const Work *w, int e, int down, int row, int rows) {
    const Layer *l = w->layer;
    const uint8_t *record = l->records[e], *matrix = record + l->offset[down];
    const size_t bytes = down ? w->down_bytes : w->up_bytes;
    const int first = w->first[e], m = l->counts[e], columns = down ? l->width : l->hidden;
    float **y = (down ? w->down_y : w->up_y) + first;
    float *from_row[64];
    for (int at = 0, n; at < m; at += n) {
        n = m - at < 64 ? m - at : 64;
        for (int j = 0; j < n; j++) from_row[j] = y[at + j] + row;
        w->isa->product(l->format, matrix + row * bytes, bytes, rows, columns, (down ? w->down_x : w->up_x) + first + at,
                        from_row, n);
    }
    if (l->bias >= 0)
        for (int j = 0; j < m; j++) add_bias(l, record + l->offset[2 + down], y[j], row, rows);
}

static void run_up(Work *w, const Piece *p) {
    const Layer *l = w->layer;
    const int e = p->expert, last = p->row + p->rows;
    product(w, e, 0, p->row, p->rows);
    if (l->stages & GATE) product(w, e, 0, l->width + p->row, p->rows);
    for (int j = w->first[e]; j < w->first[e + 1] && l->stages & GATE; j++) {
        float *y = w->up_y[j];
        w->isa->gate(y + p->row, y + l->width + p->row, p->rows);
        if (grouped(l->format) && l->stages & DOWN)
            w->isa->quantise(l->format, y, (void *)w->down_x[j], l->width, p->row / GROUP, last / GROUP);
    }
    if (atomic_fetch_sub(&w->left[e], 1) == 1) spac_wake();
}

static void run_pieces(void *data) {
    Work *w = data;
    int64_t begin = spac_now();
    for (int i = atomic_fetch_add(&w->next, 1), mine = 0; i < w->n_pieces; i = atomic_fetch_add(&w->next, 1)) {
        const Piece *p = &w->pieces[i];
        if (!mine++) atomic_fetch_add(&w->took_part, 1);
        if (p->down) {
            if (w->left[p->expert]) {
                spac_wait(&w->left[p->expert]);
                begin = spac_now();
            }
            product(w, p->expert, 1, p->row, p->rows);
        } else
            run_up(w, p);
        int64_t end = spac_now();
        atomic_fetch_add(&w->busy[p->expert], end - begin);
        begin = end;
    }
}

/* Cut `rows` into pieces of about PIECE_BYTES. Returns how many; writes them if `to` is there. */
static int cut(Piece *to, int expert, int down, int rows, size_t bytes, int multiple) {
    if (rows == 0) return 0;
    int each = (int)(PIECE_BYTES / bytes) / multiple * multiple, n = 0;
    if (each < multiple) each = multiple;
    for (int row = 0; row < rows; row += each, n++)
        if (to) to[n] = (Piece){expert, down, row, rows - row < each ? rows - row : each};
    return n;
}

static void plan(Work *w) {
    const Layer *l = w->layer;
    const int gated = l->stages & GATE, n = l->experts;
    const int ups = l->stages & UP ? (gated ? l->width : l->up_rows) : 0, downs = l->stages & DOWN ? l->hidden : 0;
    /* What is made into groups afterwards comes in whole groups. */
    const int multiple = gated && downs && grouped(l->format) ? GROUP : PIECE_ROWS;
    for (int e = 0; e <= n; e++) {
        if (e < n) {
            int made = cut(w->pieces + w->n_pieces, e, 0, ups, w->up_bytes * (gated ? 2 : 1), multiple);
            w->left[e] = made;
            w->n_pieces += made;
        }
        if (e > 0) w->n_pieces += cut(w->pieces + w->n_pieces, e - 1, 1, downs, w->down_bytes, PIECE_ROWS);
    }
}

/* Point the products at their columns and results; make columns of groups out of the rows of x that are used. */
static void connect(Work *w, char *x_columns, char *inner_columns, char *made) {
    const Layer *l = w->layer;
    const int groups = grouped(l->format), up = l->stages & UP, n_in = up ? l->hidden : l->width;
    for (int e = 0, j = 0; e < l->experts; e++) {
        w->first[e] = j;
        for (; j < w->first[e] + l->counts[e]; j++) {
            const int row = up ? l->sources[j] : j;
            const float *x = l->x + (size_t)row * n_in;
            const void *column = x;
            if (groups) {
                column = x_columns + (size_t)row * column_bytes(n_in);
                if (!made[row]) w->isa->quantise(l->format, x, (void *)column, n_in, 0, n_in / GROUP);
                made[row] = 1;
            }
            if (up) {
                w->up_x[j] = column;
                w->up_y[j] = l->middle + (size_t)j * l->up_rows;
                column = groups ? inner_columns + (size_t)j * column_bytes(l->width) : (void *)w->up_y[j];
            }
            w->down_x[j] = column;
            w->down_y[j] = l->stages & DOWN ? l->out + (size_t)l->targets[j] * l->hidden : NULL;
        }
        w->first[e + 1] = j;
    }
}

static void report(const Work *w, int64_t wall) {
    const Layer *l = w->layer;
    int64_t sum = 0;
    for (int e = 0; e < l->experts; e++) sum += l->ns[e] = w->busy[e] / w->took_part;
    l->ns[0] += wall - sum > 0 ? wall - sum : 0; /* what the call itself costs goes with the first */
}

/* The next `size` bytes of a block, on a cache line. */
static void *part(char **block, size_t size) {
    void *p = *block;
    *block += (size + 63) / 64 * 64;
    return p;
}

int spac_layer(const Layer *l) {
    const int64_t begin = spac_now();
    Work w = {.layer = l, .isa = spac_isa(l->isa)};
    if (w.isa == NULL) return 2;
    w.up_bytes = row_bytes(l->format, l->hidden);
    w.down_bytes = row_bytes(l->format, l->width);
    size_t tokens = 0;
    for (int e = 0; e < l->experts; e++) tokens += l->counts[e];
    const int groups = grouped(l->format), n_in = l->stages & UP ? l->hidden : l->width;
    const size_t most = (size_t)l->experts * (2 + (l->up_rows + l->hidden) / PIECE_ROWS);
    const size_t sizes[] = {
        groups ? l->rows * column_bytes(n_in) : 0, groups ? tokens * column_bytes(l->width) : 0, l->rows,
        most * sizeof(Piece), (l->experts + 1) * sizeof(int), l->experts * sizeof(atomic_int),
        l->experts * sizeof(int64_t), tokens * sizeof(void *), tokens * sizeof(void *), tokens * sizeof(void *),
        tokens * sizeof(void *)};
    size_t size = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) size += (sizes[i] + 63) / 64 * 64;
    char *memory = aligned_alloc(64, size), *at = memory;
    if (memory == NULL) return 1;
    char *x_columns = part(&at, sizes[0]), *inner_columns = part(&at, sizes[1]), *made = part(&at, sizes[2]);
    w.pieces = part(&at, sizes[3]);
    w.first = part(&at, sizes[4]);
    w.left = part(&at, sizes[5]);
    w.busy = part(&at, sizes[6]);
    w.up_x = part(&at, sizes[7]), w.down_x = part(&at, sizes[8]);
    w.up_y = part(&at, sizes[9]), w.down_y = part(&at, sizes[10]);
    memset(made, 0, sizes[2]);
    memset((void *)w.busy, 0, sizes[6]);
    connect(&w, x_columns, inner_columns, made);
    plan(&w);
    spac_together(run_pieces, &w, l->threads);
    report(&w, spac_now() - begin);
    free(memory);
    return 0;
}
