/* SPDX-License-Identifier: Apache-2.0
 *
 * Put before batch.c in a build for campaigns: each of its system calls is counted, and the one
 * with number `kvsafe_fault_at` fails, is short, hangs, or is the last thing that this process does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FAIL_BEFORE = 1, FAIL_AFTER, HALF, KILL_BEFORE, KILL_AFTER, KILL_HALF, STALL };
enum { NAMES = 512 };

int kvsafe_fault_at, kvsafe_fault_kind, kvsafe_fault_errno, kvsafe_fault_stalled;
int kvsafe_fault_met;
const char *kvsafe_fault_names[NAMES];

static int kvsafe_met(const char *name)
{
    if (kvsafe_fault_met < NAMES)
        kvsafe_fault_names[kvsafe_fault_met] = name;
    kvsafe_fault_met++;
    return kvsafe_fault_met == kvsafe_fault_at ? kvsafe_fault_kind : 0;
}

static void kvsafe_stall(void)
{
    volatile int *at = &kvsafe_fault_at;
    *(volatile int *)&kvsafe_fault_stalled = 1;
    for (int turn = 0; *at && turn < 60000; turn++)
        usleep(1000);
}

/* A submitted read that will be short; any other call as it is. */
static long kvsafe_short(long number, long first, long second, long third, long fourth, long fifth)
{
    if (number == SYS_io_submit)
        (*(struct iocb **)third)->aio_nbytes /= 2;
    return syscall(number, first, second, third, fourth, fifth);
}

#define KVSAFE_MET(name, call, half) __extension__({ \
    int kind_ = kvsafe_met(name); \
    long answer_ = -1; \
    if (kind_ == KILL_BEFORE) raise(SIGKILL); \
    if (kind_ == STALL) kvsafe_stall(); \
    if (kind_ == HALF || kind_ == KILL_HALF) answer_ = (half); \
    else if (kind_ != FAIL_BEFORE) answer_ = (call); \
    if (kind_ == KILL_AFTER || kind_ == KILL_HALF) raise(SIGKILL); \
    if (kind_ == FAIL_BEFORE || kind_ == FAIL_AFTER) { \
        answer_ = -1; \
        errno = kvsafe_fault_errno; \
    } \
    answer_; })
#define KVSAFE_WHOLE(name, ...) KVSAFE_MET(#name, name(__VA_ARGS__), name(__VA_ARGS__))

#define openat(...) KVSAFE_WHOLE(openat, __VA_ARGS__)
#define fstatat(...) KVSAFE_WHOLE(fstatat, __VA_ARGS__)
#define fstat(...) KVSAFE_WHOLE(fstat, __VA_ARGS__)
#define futimens(...) KVSAFE_WHOLE(futimens, __VA_ARGS__)
#define fdatasync(...) KVSAFE_WHOLE(fdatasync, __VA_ARGS__)
#define renameat2(...) KVSAFE_WHOLE(renameat2, __VA_ARGS__)
#define close(...) KVSAFE_WHOLE(close, __VA_ARGS__)
#define pread(fd, into, bytes, at) \
    KVSAFE_MET("pread", pread(fd, into, bytes, at), pread(fd, into, (bytes) / 2, at))
#define pwrite(fd, row, bytes, at) \
    KVSAFE_MET("pwrite", pwrite(fd, row, bytes, at), pwrite(fd, row, (bytes) / 2, at))

/* Up to five numbers or places, filled up with zeros. */
#define KVSAFE_FIVE(number, a, b, c, d, e, ...) \
    (number), (long)(a), (long)(b), (long)(c), (long)(d), (long)(e)
#define syscall(number, ...) \
    KVSAFE_MET(&#number[sizeof "SYS_" - 1], syscall(number, __VA_ARGS__), \
               kvsafe_short(KVSAFE_FIVE(number, __VA_ARGS__, 0, 0, 0, 0)))
