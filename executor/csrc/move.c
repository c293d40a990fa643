/* Bytes moved past the caches, as a GPU's copy engine moves them: it takes nothing from them that others work with, and
 * the lines that are written are not read first. Returns how long it took, in nanoseconds: whoever waits for Python's
 * interpreter afterwards could not tell.
 */
#include "kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, SOON = 32 * LINE };

static void move(uint8_t *to, const uint8_t *from, size_t bytes) {
    const size_t odd = (LINE - ((uintptr_t)to & (LINE - 1))) & (LINE - 1), head = odd < bytes ? odd : bytes;
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    const size_t lines = bytes / LINE;
    for (size_t i = 0; i < lines; i++, to += LINE, from += LINE) {
        __builtin_prefetch(from + SOON, 0, 0);
        const __m128i *part = (const __m128i *)from;
        __m128i a = _mm_loadu_si128(part), b = _mm_loadu_si128(part + 1);
        __m128i c = _mm_loadu_si128(part + 2), d = _mm_loadu_si128(part + 3);
        _mm_stream_si128((__m128i *)to, a), _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c), _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, bytes % LINE);
    _mm_sfence(); /* all of it is there for whoever is told so */
}
#else
static void move(uint8_t *to, const uint8_t *from, size_t bytes) { memcpy(to, from, bytes); }
#endif

int64_t spac_move(uint8_t *to, const uint8_t *from, size_t bytes) {
    const int64_t begin = spac_now();
    move(to, from, bytes);
    return spac_now() - begin;
}
