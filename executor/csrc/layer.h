#ifndef SPAC_LAYER_H
#define SPAC_LAYER_H

#include "kernels.h"

/* As `kernels.py` fills it in. Matrices are [rows, row bytes] in `format`; activations and results are floats. */
typedef struct {
    int32_t format, bias;         /* bias: F32, BF16 or F16; -1 where there is none */
    int32_t hidden, width, up_rows;
    int32_t stages;               /* UP, DOWN or both; GATE if silu(gate) * up stands between them */
    int32_t experts, rows;        /* rows: of x */
    int32_t threads;
    const char *isa;              /* as spac_isa takes it */
    uint64_t offset[4];           /* of up, down and their biases in a record */
    const uint8_t *const *records; /* [experts] */
    const int32_t *counts;        /* [experts] tokens of each, at least 1 */
    const int32_t *sources;       /* [tokens of all] rows of x */
    const int32_t *targets;       /* [tokens of all] rows of out */
    const float *x;               /* [rows, hidden]; with DOWN alone [tokens of all, width] */
    float *middle;                /* [tokens of all, up_rows] */
    float *out;                   /* [.., hidden] */
    int64_t *ns;                  /* [experts]: the threads' time for each, shared by their number; together the wall's */
} Layer;

/* 0, or 1 if there is no memory, or 2 if this processor lacks the instruction set. */
int spac_layer(const Layer *l);

#endif
