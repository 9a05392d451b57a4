/* Keys and values into the cache, and queries and keys as they attend. */
#ifndef ATTENTION_WRITE_H
#define ATTENTION_WRITE_H

#include "attention.h"

/* x less its mean. */
ALWAYS_INLINE void center(float *x, ptrdiff_t size) {
    float sum = 0;
    for (ptrdiff_t i = 0; i < size; i++)
        sum += x[i];
    for (ptrdiff_t i = 0; i < size; i++)
        x[i] -= sum / (float)size;
}

/* x by its own size, then by its weights. */
ALWAYS_INLINE void scale_head(float *restrict x, const float *restrict weights, ptrdiff_t size, float eps) {
    lanes squares = {0};
    float rest = 0;
    ptrdiff_t i = 0;
    for (; i + LANES <= size; i += LANES)
        squares += load(x + i) * load(x + i);
    for (; i < size; i++)
        rest += x[i] * x[i];
    float scale = 1.0f / sqrtf((added_up(squares) + rest) / (float)size + eps);
    for (i = 0; i < size; i++)
        x[i] = x[i] * scale * weights[i];
}

/* A head's numbers by its norm; `other` [size] is used up. */
ALWAYS_INLINE void norm_head(float *restrict x, float *restrict other, const norm_weights *norm, ptrdiff_t head,
                             ptrdiff_t size, int mode) {
    ptrdiff_t first = norm->by_head ? head * size : 0;
    int is_bf16 = mode == PAIRS && !norm->wide;
    if (norm->bias)
        center(x, size);
    widen(other, (const char *)norm->weight + first * (is_bf16 ? 2 : 4), size, is_bf16);
    scale_head(x, other, size, norm->eps);
    if (norm->bias) {
        widen(other, (const char *)norm->bias + first * number_bytes(mode), size, mode == PAIRS);
        for (ptrdiff_t i = 0; i < size; i++)
            x[i] += other[i];
    }
}

/* Half of a head's numbers, rotated: `sin` as stored for them, `other` the other half. */
ALWAYS_INLINE void turn(float *restrict to, const float *restrict x, const float *restrict other,
                        const void *restrict cos, const void *restrict sin, ptrdiff_t first, ptrdiff_t half, int mode) {
    if (mode != PAIRS)
        for (ptrdiff_t i = 0; i < half; i++)
            to[i] = x[i] * ((const float *)cos)[first + i] + other[i] * ((const float *)sin)[first + i];
    else
        for (ptrdiff_t i = 0; i < half; i++)
            to[i] = x[i] * float_of_bf16(((const bf16 *)cos)[first + i])
                + other[i] * float_of_bf16(((const bf16 *)sin)[first + i]);
}

/* A head's query as it attends, or its key (`cached`): normed and turned where the model does that, in its order, keys
   as the cache has them. Points to its words: `from` itself, or `to`. */
NEVER_INLINE const void *prepared(const attention_layer *layer, const workspace *work, const void *from,
                                  const norm_weights *norm, ptrdiff_t token, ptrdiff_t head, void *to, int cached,
                                  int mode) {
    const head_rotation *rotation = layer->rotation;
    ptrdiff_t size = layer->step->head_dim, half = size / 2;
    int is_bf16 = cached ? mode != FLOATS : mode == PAIRS;
    if (!rotation) {
        if (mode != FLOATS_BY_PAIRS || !cached)
            return from;
        narrow(to, from, size, is_bf16);
        return to;
    }
    ptrdiff_t row = token * rotation->stride * number_bytes(mode);
    float *x = work->numbers, *turned = work->turned;
    widen(x, from, size, mode == PAIRS);
    int normed = norm && norm->weight;
    if (normed && !norm->last)
        norm_head(x, turned, norm, head, size, mode);
    const char *cos = (const char *)rotation->cos + row, *sin = (const char *)rotation->sin + row;
    turn(turned, x, x + half, cos, sin, 0, half, mode);
    turn(turned + half, x + half, x, cos, sin, half, half, mode);
    if (normed && norm->last)
        norm_head(turned, x, norm, head, size, mode);
    narrow(to, turned, size, is_bf16);
    return to;
}

/* One token's key and value into their panel. Other tokens' may be written at the same time by others, so no byte of
   theirs is touched. */
ALWAYS_INLINE void put_token(const attention_step *step, uint32_t *panel, ptrdiff_t lane, const void *key,
                             const void *value, int mode) {
    ptrdiff_t size = step->head_dim, steps = size / word_numbers(mode);
    for (ptrdiff_t i = 0; i < steps; i++)
        memcpy(panel + i * PANEL + lane, (const char *)key + 4 * i, 4);
    uint32_t *values = panel + steps * PANEL + lane / word_numbers(mode) * size;
    if (mode == FLOATS)
        memcpy(values, value, (size_t)size * 4);
    else
        for (ptrdiff_t i = 0; i < size; i++)
            ((bf16 *)values)[2 * i + lane % 2] = ((const bf16 *)value)[i];
}

static void put_row(const attention_step *step, uint32_t *cache, ptrdiff_t slot, ptrdiff_t head, const void *key,
                    const void *value, int mode) {
    ptrdiff_t bytes = step->head_dim * 4 / word_numbers(mode);
    ptrdiff_t block = slot / step->block_size, offset = slot % step->block_size;
    char *keys = (char *)(cache + block * step->block_stride) + head * 2 * step->block_size * bytes;
    memcpy(keys + offset * bytes, key, (size_t)bytes);
    memcpy(keys + (step->block_size + offset) * bytes, value, (size_t)bytes);
}

/* A whole panel at once: `keys` and `values` are of its 16 tokens. */
NEVER_INLINE void put_panel(const attention_step *step, uint32_t *panel, const char *const keys[PANEL],
                            const char *const values[PANEL],
                             int mode) {
    ptrdiff_t size = step->head_dim, steps = size / word_numbers(mode);
    for (ptrdiff_t from = 0; from < steps; from += LANES)
        for (ptrdiff_t lane = 0; lane < PANEL; lane += LANES) {
            words square[LANES];
            ptrdiff_t width = at_most(LANES, steps - from);
            for (ptrdiff_t i = 0; i < LANES; i++) {
                square[i] = (words){0};
                if (width == LANES)
                    square[i] = load_words(keys[lane + i] + 4 * from);
                else
                    memcpy(&square[i], keys[lane + i] + 4 * from, (size_t)width * 4);
            }
            transpose(square);
            for (ptrdiff_t i = 0; i < width; i++)
                store_words(panel + (from + i) * PANEL + lane, square[i]);
        }
    panel += steps * PANEL;
    for (ptrdiff_t token = 0; token < PANEL; token += word_numbers(mode), panel += size) {
        if (mode == FLOATS) {
            memcpy(panel, values[token], (size_t)size * 4);
            continue;
        }
        const bf16 *even = (const bf16 *)values[token], *odd = (const bf16 *)values[token + 1];
        for (ptrdiff_t i = 0; i < size; i++)
            panel[i] = even[i] | (uint32_t)odd[i] << 16;
    }
}

/* Whether the tokens from `token` on are those of a whole panel, in their order. */
static int panel_begins(const attention_step *step, ptrdiff_t token, ptrdiff_t end) {
    const int64_t *slots = step->slots + token;
    if (end - token < PANEL || slots[0] % PANEL)
        return 0;
    for (ptrdiff_t i = 1; i < PANEL; i++)
        if (slots[i] != slots[0] + i)
            return 0;
    return 1;
}

/* `count` tokens' keys and values of one head: one token, or a panel of them. */
ALWAYS_INLINE void write_head(const attention_layer *layer, const workspace *work, ptrdiff_t token, ptrdiff_t count,
                              ptrdiff_t head, int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t slot = step->slots[token], steps = key_words(step->head_dim, mode),
              bytes = step->head_dim * number_bytes(mode);
    const char *keys[PANEL], *values[PANEL];
    for (ptrdiff_t i = 0; i < count; i++) {
        const void *key = numbers_at(layer->k, step->key_stride, token + i, head, mode);
        fetch(numbers_at(layer->k, step->key_stride, token + i, head + 1, mode), bytes);
        fetch(numbers_at(layer->v, step->value_stride, token + i, head + 1, mode), bytes);
        keys[i] = prepared(layer, work, key, layer->key_norm, token + i, head, work->queries + i * steps, 1,
                           mode);
        values[i] = numbers_at(layer->v, step->value_stride, token + i, head, mode);
        if (mode == FLOATS_BY_PAIRS) {
            narrow(work->values + i * steps, (const float *)(const void *)values[i], step->head_dim, 1);
            values[i] = (const char *)(work->values + i * steps);
        }
    }
    if (!in_panels(step->head_dim, step->block_size)) {
        put_row(step, layer->cache, slot, head, keys[0], values[0], mode);
        return;
    }
    uint32_t *panel = panel_at(step, layer->cache, slot / step->block_size, head, slot % step->block_size, mode);
    if (count == PANEL)
        put_panel(step, panel, keys, values, mode);
    else
        put_token(step, panel, slot % PANEL, keys[0], values[0], mode);
}

ALWAYS_INLINE void write_tokens(const attention_layer *layer, const workspace *work, ptrdiff_t from, ptrdiff_t to,
                                int mode) {
    const attention_step *step = layer->step;
    int whole = in_panels(step->head_dim, step->block_size);
    for (ptrdiff_t count = 1, token = from; token < to; token += count) {
        count = whole && panel_begins(step, token, to) ? PANEL : 1;
        for (ptrdiff_t head = 0; head < step->kv_heads; head++)
            write_head(layer, work, token, count, head, mode);
    }
}

/* A share of all tokens, as far as they are written ahead. */
ALWAYS_INLINE void write_share(const attention_layer *layer, const workspace *work, ptrdiff_t share, int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t from = share * step->num_tokens / step->shares, to = (share + 1) * step->num_tokens / step->shares;
    for (ptrdiff_t row = 0; row < step->num_rows; row++)
        if (step->ahead[row])
            write_tokens(layer, work, at_least(from, step->query_start[row]), at_most(to, step->query_start[row + 1]),
                         mode);
}

/* A tile's own tokens, where queries are few and these were not written ahead: no other tile reads them in this
   step. */
ALWAYS_INLINE void write_tile(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan,
                              int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t position = plan->start;
    if (step->ahead[t->row] || !layer->k)
        return;
    for (ptrdiff_t token = step->query_start[t->row]; token < step->query_start[t->row + 1]; token++, position++)
        if (plan->segments == 1 || (t->begin <= position && position < t->end))
            for (ptrdiff_t head = t->head; head < t->head + t->heads; head++)
                write_head(layer, work, token, 1, head, mode);
}

#endif
