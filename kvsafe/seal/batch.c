/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens many rows of suite aes256-gmac in one call, without the interpreter's lock. Loaded by
 * batch.py through ctypes.
 *
 * There is one question only: is this row exactly one that we would have sealed? It is, if its
 * header tag is right, its header is byte for byte ours (but for the time, the generation and the
 * tags, which no reader can know before), each slice has the tag that its record says, and the
 * tail is zero. Whatever else a row is, opening.py opens it and knows why. Nothing that a row
 * declares is used as a length or a place: all of them come from the caller. No memory is
 * allocated but what libcrypto needs for two states.
 *
 * The cryptography is OpenSSL's (EVP_MAC, 3.0 and later); batch.py hands its functions over. Each
 * message begins with its key: beginning again without one is not promised, and does nothing in
 * 3.0.0 to 3.0.2.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { TAG = 32, GMAC = 16, HEAD_MOST = 16384, KEY_MOST = 128 };

/* Where the fields lie that differ from row to row: see layout.py. */
enum { EPOCH_AT = 24, GENERATION_AT = 32, TIME_AT = 40, TIME_END = 48, KEY_AT = 144 };
enum { RECORD = 64, RECORD_GENERATION_AT = 24, RECORD_TAG_AT = 32 };
enum { CONTEXT_EPOCH_AT = 24, CONTEXT_GENERATION_AT = 32, CONTEXT_KEY_AT = 72 };

/* OpenSSL's, as its manual gives them: params.h and EVP_MAC(3). */
struct param {
    const char *key;
    unsigned int data_type;
    void *data;
    size_t data_size;
    size_t return_size;
};
enum { PARAM_TEXT = 4, PARAM_BYTES = 5 };
#define LAST { NULL, 0, NULL, 0, 0 }
typedef struct evp_mac_ctx_st state;
struct crypto {
    state *(*begin)(void *mac);                                             /* EVP_MAC_CTX_new */
    void (*end)(state *);                                                   /* EVP_MAC_CTX_free */
    int (*set)(state *, const struct param *);                              /* _CTX_set_params */
    int (*init)(state *, const uint8_t *key, size_t bytes, const struct param *);
    int (*update)(state *, const uint8_t *data, size_t bytes);
    int (*final)(state *, uint8_t *out, size_t *bytes, size_t room);
    int (*differ)(const void *, const void *, size_t bytes);                /* CRYPTO_memcmp */
    void *hmac;
    void *gmac;
};

struct slice {
    int64_t start; /* first byte in the row */
    int64_t bytes;
    const uint8_t *context; /* of its tag; zeros for epoch, generation and key */
};

/* What is the same for all rows of an engine. */
struct rows {
    int64_t header_bytes;
    int64_t tail_at; /* first byte behind the payload */
    int64_t row_bytes;
    int64_t key_bytes;
    int64_t slices;
    const uint8_t *head; /* a header that was sealed, whatever its time, generation and tags */
    const struct slice *places;
    const uint8_t *header_key;
    const uint8_t *slice_key;
};

/* What batch.py believes: another number for another meaning of this file, then sizes. */
EXPORT const int32_t kvsafe_seal_sizes[4]
    = { 1, sizeof(struct crypto), sizeof(struct slice), sizeof(struct rows) };

struct opening {
    const struct crypto *crypto;
    const struct rows *rows;
    state *hmac;
    state *gmac;
};

static int final_is(const struct crypto *crypto, state *mac, uint8_t *out, size_t bytes)
{
    size_t got = 0;
    return crypto->final(mac, out, &got, bytes) == 1 && got == bytes;
}

static int gmac(const struct opening *open, const uint8_t *key, const uint8_t *data, size_t bytes,
                uint8_t *out)
{
    uint8_t nonce[12] = { 0 };
    const struct param params[] = { { "iv", PARAM_BYTES, nonce, sizeof nonce, 0 }, LAST };
    const struct crypto *crypto = open->crypto;
    return crypto->init(open->gmac, key, TAG, params) == 1
        && crypto->update(open->gmac, data, bytes) == 1 && final_is(crypto, open->gmac, out, GMAC);
}

/* HMAC of a byte, a context, and what may follow it. */
static int hmac(const struct opening *open, uint8_t first, const uint8_t *context, size_t bytes,
                const uint8_t *more, size_t more_bytes, uint8_t *out)
{
    const struct crypto *crypto = open->crypto;
    return crypto->init(open->hmac, open->rows->slice_key, TAG, NULL) == 1
        && crypto->update(open->hmac, &first, 1) == 1
        && crypto->update(open->hmac, context, bytes) == 1
        && (more_bytes == 0 || crypto->update(open->hmac, more, more_bytes) == 1)
        && final_is(crypto, open->hmac, out, TAG);
}

static int is_slice(const struct opening *open, const uint8_t *row, const uint8_t *key,
                    const uint8_t *head, const struct slice *place, const uint8_t *tag)
{
    uint8_t context[CONTEXT_KEY_AT + KEY_MOST], secret[TAG], hash[GMAC], found[TAG];
    size_t key_bytes = (size_t)open->rows->key_bytes, bytes = CONTEXT_KEY_AT + key_bytes;
    memcpy(context, place->context, CONTEXT_KEY_AT);
    memcpy(context + CONTEXT_EPOCH_AT, head + EPOCH_AT, 8);
    memcpy(context + CONTEXT_GENERATION_AT, head + GENERATION_AT, 8);
    memcpy(context + CONTEXT_KEY_AT, key, key_bytes);
    return hmac(open, 1, context, bytes, NULL, 0, secret)
        && gmac(open, secret, row + place->start, (size_t)place->bytes, hash)
        && hmac(open, 2, context, bytes, hash, GMAC, found)
        && open->crypto->differ(found, tag, TAG) == 0;
}

static int is_header_tag(const struct opening *open, const uint8_t *head)
{
    const struct crypto *crypto = open->crypto;
    size_t bytes = (size_t)open->rows->header_bytes - TAG;
    uint8_t found[TAG];
    return crypto->init(open->hmac, open->rows->header_key, TAG, NULL) == 1
        && crypto->update(open->hmac, head, bytes) == 1
        && final_is(crypto, open->hmac, found, TAG)
        && crypto->differ(found, head + bytes, TAG) == 0;
}

static int same(const uint8_t *left, const uint8_t *right, int64_t from, int64_t to)
{
    return memcmp(left + from, right + from, (size_t)(to - from)) == 0;
}

/* Whether a header is the one that we would have sealed for this key and epoch. */
static int is_head(const struct rows *rows, const uint8_t *head, const uint8_t *key,
                   const uint8_t *epoch)
{
    int64_t records = rows->header_bytes - TAG - RECORD * rows->slices;
    if (!same(head, rows->head, 0, EPOCH_AT) || memcmp(head + EPOCH_AT, epoch, 8) != 0
        || !same(head, rows->head, TIME_END, KEY_AT)
        || memcmp(head + KEY_AT, key, (size_t)rows->key_bytes) != 0
        || !same(head, rows->head, KEY_AT + rows->key_bytes, records))
        return 0;
    for (int64_t i = 0; i < rows->slices; i++) {
        int64_t at = records + RECORD * i;
        if (!same(head, rows->head, at, at + RECORD_GENERATION_AT)
            || memcmp(head + at + RECORD_GENERATION_AT, head + GENERATION_AT, 8) != 0)
            return 0;
    }
    return 1;
}

static int is_zero(const uint8_t *bytes, int64_t count)
{
    uint8_t any = 0;
    for (int64_t i = 0; i < count; i++)
        any |= bytes[i];
    return any == 0;
}

static int is_right(const struct opening *open, const uint8_t *row, const uint8_t *key,
                    const uint8_t *epoch)
{
    const struct rows *rows = open->rows;
    uint8_t head[HEAD_MOST];
    /* Read once: what was checked is what is used, also if the row changes meanwhile. */
    memcpy(head, row, (size_t)rows->header_bytes);
    if (!is_header_tag(open, head) || !is_head(rows, head, key, epoch)
        || !is_zero(row + rows->tail_at, rows->row_bytes - rows->tail_at))
        return 0;
    int64_t records = rows->header_bytes - TAG - RECORD * rows->slices;
    for (int64_t i = 0; i < rows->slices; i++)
        if (!is_slice(open, row, key, head, &rows->places[i],
                      head + records + RECORD * i + RECORD_TAG_AT))
            return 0;
    return 1;
}

static int begin(struct opening *open)
{
    static const char sha256[] = "SHA256", cipher[] = "AES-256-GCM";
    const struct param digest[]
        = { { "digest", PARAM_TEXT, (void *)sha256, sizeof sha256 - 1, 0 }, LAST };
    const struct param block[]
        = { { "cipher", PARAM_TEXT, (void *)cipher, sizeof cipher - 1, 0 }, LAST };
    const struct crypto *crypto = open->crypto;
    open->hmac = crypto->begin(crypto->hmac);
    open->gmac = crypto->begin(crypto->gmac);
    return open->hmac != NULL && open->gmac != NULL && crypto->set(open->hmac, digest) == 1
        && crypto->set(open->gmac, block) == 1;
}

/* Per row 1 if it is right, else 0. `keys` are of `key_bytes`, `epoch` of 8, little-endian. */
EXPORT void kvsafe_open(int64_t count, const uint8_t *const *rows, const uint8_t *const *keys,
                        const uint8_t *epoch, const struct rows *want, const struct crypto *crypto,
                        uint8_t *answers)
{
    struct opening open = { .crypto = crypto, .rows = want };
    int begun = want->header_bytes <= HEAD_MOST && want->key_bytes <= KEY_MOST && begin(&open);
    for (int64_t i = 0; i < count; i++)
        answers[i] = begun && is_right(&open, rows[i], keys[i], epoch);
    crypto->end(open.hmac);
    crypto->end(open.gmac);
}
