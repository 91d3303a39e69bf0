/* SPDX-License-Identifier: Apache-2.0
 *
 * The plain course of many chunk files in one call, so that the interpreter's lock is handed over
 * once for all of them. Loaded by batch.py through ctypes; needs nothing but the C library.
 *
 * Nothing is decided here. What does not go exactly as it should (a file that is not there, not
 * plain, cut, too old; any error of any call) is answered with how much of it there may be, and the
 * caller removes that and takes this one file the long way, in Python, where refusals, quarantine
 * and errors are. No byte of a file is looked at. No memory is allocated but the kernel's for a
 * thread's queue of reads, and nothing is waited for but the kernel.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* What comes of a file: as it should be; to be taken the long way, and nothing was made of it; not
 * there; there already; its temporary may be there, in part; its temporary was written whole. */
enum { PLAIN = 0, ASIDE = -1, ABSENT = -2, STANDS = -3, PART = -4, WHOLE = -5 };

/* Longest name of a file, with its end. */
enum { NAME = 256 };

#define MOST_S 9000000000

/* What a file must be. Times in nanoseconds since 1970. */
struct rule {
    int64_t bytes;       /* its exact length */
    int64_t written_min; /* written before this: outlived */
    int64_t used_min;    /* used before this: its time of use is set to `now` */
    int64_t now;
    int64_t until;       /* CLOCK_MONOTONIC: no further file is begun after it */
    uint32_t mode;       /* type and permissions, exactly */
    uint32_t owner;
};

/* Which file it was. */
struct seen {
    uint64_t inode;
    int64_t written;
};

/* Names of files: so many digits each, one name after the other, and what follows on each. */
struct naming {
    const char *digits;
    int64_t each;
    const char *suffix;
};

/* New files: the beginning of their temporary names, and the number of the first one. */
struct making {
    const char *temporary;
    uint64_t first;
    int32_t flags;        /* to open with */
    int32_t sync;         /* whether each is on the disk before it has its name */
};

/* What batch.py believes; it loads nothing else: another number for another meaning of this file,
 * then sizes. */
EXPORT const int32_t kvsafe_batch_sizes[5] = {
    3, sizeof(struct rule), sizeof(struct seen), sizeof(struct naming), sizeof(struct making),
};

/* The nearest that 64 bits hold: a file may tell any time. */
static int64_t in_ns(const struct timespec *time)
{
    if (time->tv_sec > MOST_S)
        return INT64_MAX;
    if (time->tv_sec < -MOST_S)
        return INT64_MIN;
    return (int64_t)time->tv_sec * 1000000000 + time->tv_nsec;
}

static int is_over(const struct rule *rule)
{
    struct timespec time;
    return clock_gettime(CLOCK_MONOTONIC, &time) != 0 || in_ns(&time) > rule->until;
}

static int is_plain(const struct stat *info, const struct rule *rule)
{
    return info->st_mode == rule->mode && info->st_uid == rule->owner && info->st_nlink == 1
        && info->st_size == rule->bytes && in_ns(&info->st_mtim) >= rule->written_min;
}

/* The name of file number `i`. False if it would be too long. */
static int name_file(char *into, const struct naming *naming, int64_t i)
{
    int length = snprintf(into, NAME, "%.*s%s", (int)naming->each,
                          naming->digits + i * naming->each, naming->suffix);
    return length > 0 && length < NAME;
}

static int32_t look_at(int folder, const char *name, const struct rule *rule)
{
    struct stat info;
    if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0)
        return is_plain(&info, rule) ? PLAIN : ASIDE;
    return errno == ENOENT ? ABSENT : ASIDE;
}

/* Per name: PLAIN, ABSENT, or ASIDE. How many names were looked at before time was over. */
EXPORT int64_t kvsafe_look(int64_t count, const int *folders, const struct naming *naming,
                           const struct rule *rule, int32_t *answers)
{
    for (int64_t i = 0; i < count; i++) {
        char name[NAME];
        if (i > 0 && is_over(rule))
            return i;
        answers[i] = name_file(name, naming, i) ? look_at(folders[i], name, rule) : ASIDE;
    }
    return count;
}

/* The time of use, where it is not recent; the time of writing stays. */
static int mark_used(int fd, const struct stat *info, const struct rule *rule)
{
    if (in_ns(&info->st_atim) >= rule->used_min)
        return 0;
    struct timespec times[2] = {
        { .tv_sec = rule->now / 1000000000, .tv_nsec = rule->now % 1000000000 },
        info->st_mtim,
    };
    return futimens(fd, times);
}

/* Reads past the page cache go to the disk together: each thread has a queue for them (io_setup),
 * made at its first batch, gone with the thread. Where there is none (0), or it does not take a
 * read (another process after a fork), files are read one after the other. */
enum { TOGETHER = 32 };

static pthread_key_t queue_key;
static pthread_once_t queue_once = PTHREAD_ONCE_INIT;
static int has_queues;

/* Waits for what is under way. */
static void queue_end(void *queue)
{
    (void)!syscall(SYS_io_destroy, (aio_context_t)queue);
}

static void queues_begin(void)
{
    has_queues = pthread_key_create(&queue_key, queue_end) == 0;
}

static aio_context_t own_queue(void)
{
    (void)pthread_once(&queue_once, queues_begin);
    if (!has_queues)
        return 0;
    aio_context_t queue = (aio_context_t)pthread_getspecific(queue_key);
    if (queue != 0 || syscall(SYS_io_setup, TOGETHER, &queue) != 0)
        return queue;
    /* Whoever may begin reads and not wait for them (a seccomp profile) must not begin any. */
    if (syscall(SYS_io_getevents, queue, 0, 0, NULL, NULL) == 0
        && pthread_setspecific(queue_key, (void *)queue) == 0)
        return queue;
    queue_end((void *)queue);
    return 0;
}

/* Whether a read was begun. */
static int begin_read(aio_context_t queue, struct iocb *read, int fd, char *into, int64_t bytes,
                      int64_t at)
{
    memset(read, 0, sizeof *read);
    read->aio_lio_opcode = IOCB_CMD_PREAD;
    read->aio_fildes = (uint32_t)fd;
    read->aio_buf = (uintptr_t)into;
    read->aio_nbytes = (uint64_t)bytes;
    read->aio_data = (uint64_t)at;
    return syscall(SYS_io_submit, queue, 1, &read) == 1;
}

/* Wait for every read that was begun: before that no buffer may be used for anything. */
static void end_reads(aio_context_t queue, int64_t begun, int64_t bytes, int32_t *answers)
{
    while (begun > 0) {
        struct io_event events[TOGETHER];
        long ended = syscall(SYS_io_getevents, queue, begun, TOGETHER, events, NULL);
        if (ended < 0 && errno == EINTR)
            continue;
        if (ended <= 0) {
            /* As no kernel should. The reads end all the same, and count as none; if they cannot
             * be ended either, this thread stays here, as in any call that does not return. */
            (void)pthread_setspecific(queue_key, NULL);
            while (syscall(SYS_io_destroy, queue) != 0)
                pause();
            return;
        }
        for (long i = 0; i < ended; i++)
            answers[events[i].data] = events[i].res == bytes ? PLAIN : ASIDE;
        begun -= ended;
    }
}

static int may_read(int fd, const struct rule *rule, struct seen *seen)
{
    struct stat info;
    if (fstat(fd, &info) != 0 || !is_plain(&info, rule) || mark_used(fd, &info, rule) != 0)
        return 0;
    seen->inode = info.st_ino;
    seen->written = in_ns(&info.st_mtim);
    return 1;
}

/* A file to be read, open; -1 if it is none. */
static int open_to_read(int folder, const struct naming *naming, int64_t i, int flags,
                        const struct rule *rule, struct seen *seen)
{
    char name[NAME];
    int fd = name_file(name, naming, i) ? openat(folder, name, flags) : -1;
    if (fd < 0 || may_read(fd, rule, seen))
        return fd;
    (void)close(fd);
    return -1;
}

/* At most TOGETHER files, from number `first` on. */
static void read_some(int64_t first, int64_t count, const int *folders,
                      const struct naming *naming, char *const *buffers, int flags,
                      const struct rule *rule, int32_t *answers, struct seen *seen)
{
    struct iocb reads[TOGETHER];
    int fds[TOGETHER];
    int64_t begun = 0;
    aio_context_t queue = flags & O_DIRECT && count > 1 ? own_queue() : 0;
    for (int64_t i = 0; i < count; i++) {
        answers[i] = ASIDE;
        fds[i] = i > 0 && is_over(rule)
            ? -1 : open_to_read(folders[i], naming, first + i, flags, rule, &seen[i]);
        if (fds[i] < 0)
            continue;
        if (queue != 0 && begin_read(queue, &reads[i], fds[i], buffers[i], rule->bytes, i))
            begun++;
        else if (pread(fds[i], buffers[i], (size_t)rule->bytes, 0) == rule->bytes)
            answers[i] = PLAIN;
    }
    end_reads(queue, begun, rule->bytes, answers);
    for (int64_t i = 0; i < count; i++)
        if (fds[i] >= 0 && close(fds[i]) != 0)
            answers[i] = ASIDE;
}

/* Read whole files into buffers of `rule->bytes`. Per file: PLAIN, or ASIDE (buffer undefined). */
EXPORT void kvsafe_read(int64_t count, const int *folders, const struct naming *naming,
                        char *const *buffers, int flags, const struct rule *rule,
                        int32_t *answers, struct seen *seen)
{
    for (int64_t at = 0; at < count; at += TOGETHER) {
        int64_t some = count - at < TOGETHER ? count - at : TOGETHER;
        read_some(at, some, folders + at, naming, buffers + at, flags, rule, answers + at,
                  seen + at);
    }
}

/* Whether a new file was written whole, is on the disk if that is wanted, and is closed. */
static int write_new(int folder, const char *temporary, const char *row,
                     const struct making *making, const struct rule *rule)
{
    int fd = openat(folder, temporary, making->flags, 0600);
    if (fd < 0)
        return 0;
    int whole = pwrite(fd, row, (size_t)rule->bytes, 0) == rule->bytes
        && (!making->sync || fdatasync(fd) == 0);
    return close(fd) == 0 && whole;
}

/* From the moment that an order is withdrawn on, its rows may be other chunks'. */
static int is_withdrawn(const int32_t *withdrawn)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* after all that was read of the row */
    return __atomic_load_n(withdrawn, __ATOMIC_SEQ_CST);
}

/* PLAIN: it has its name now, and has replaced nothing. */
static int32_t store_one(int64_t i, int folder, const struct naming *naming, const char *row,
                         const struct making *making, const struct rule *rule,
                         const int32_t *withdrawn, int32_t *answer)
{
    char name[NAME], temporary[NAME];
    int length = snprintf(temporary, NAME, "%s%llx", making->temporary,
                          (unsigned long long)making->first + (unsigned long long)i);
    if (length < 0 || length >= NAME || !name_file(name, naming, i))
        return ASIDE;
    int32_t found = look_at(folder, name, rule);
    if (found != ABSENT)
        return found == PLAIN ? STANDS : ASIDE;
    *answer = WHOLE; /* as far as anybody knows who does not hear the end of it */
    if (!write_new(folder, temporary, row, making, rule))
        return PART;
    if (is_withdrawn(withdrawn))
        return WHOLE;
    return renameat2(folder, temporary, folder, name, RENAME_NOREPLACE) == 0 ? PLAIN : WHOLE;
}

/* Make new files from rows of `rule->bytes`, each under a temporary name first. Per file: PLAIN,
 * STANDS, ASIDE (as they all are to begin with), PART or WHOLE. Nothing is begun, and nothing gets
 * its name, once `withdrawn`. */
EXPORT void kvsafe_store(int64_t count, const int *folders, const struct naming *naming,
                         const char *const *rows, const struct making *making,
                         const struct rule *rule, const int32_t *withdrawn, int32_t *answers)
{
    for (int64_t i = 0; i < count; i++) {
        if (i > 0 && (is_over(rule) || is_withdrawn(withdrawn)))
            return;
        answers[i] = store_one(i, folders[i], naming, rows[i], making, rule, withdrawn,
                               &answers[i]);
    }
}

/* Copy `bytes` from each to each; they do not overlap. */
EXPORT void kvsafe_copy(int64_t count, char *const *to, const char *const *from, int64_t bytes)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(to[i], from[i], (size_t)bytes);
}
