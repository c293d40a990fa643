#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "pool.h"

enum { MOST = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_there = PTHREAD_COND_INITIALIZER, work_over = PTHREAD_COND_INITIALIZER;
static pthread_cond_t piece_done = PTHREAD_COND_INITIALIZER;
static atomic_int waiting;

static void (*work_now)(void *);
static void *data_now;
static unsigned long number; /* of the call; a thread joins each at most once */
static int places, active, size;

static void *member(void *unused) {
    unsigned long seen = 0;
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (work_now == NULL || places == 0 || number == seen) pthread_cond_wait(&work_there, &lock);
        void (*work)(void *) = work_now;
        void *data = data_now;
        seen = number;
        places--;
        active++;
        pthread_mutex_unlock(&lock);
        work(data);
        pthread_mutex_lock(&lock);
        if (--active == 0) pthread_cond_signal(&work_over);
    }
    return NULL;
}

/* A child process has none of the threads. */
static void after_fork(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&turn, NULL);
    pthread_cond_init(&work_there, NULL);
    pthread_cond_init(&work_over, NULL);
    pthread_cond_init(&piece_done, NULL);
    work_now = NULL;
    active = size = 0;
    waiting = 0;
}

static void grow(int wanted) {
    static int watched;
    if (!watched) watched = !pthread_atfork(NULL, NULL, after_fork);
    for (pthread_t thread; size < wanted && size < MOST; size++) {
        if (pthread_create(&thread, NULL, member, NULL)) return;
        pthread_detach(thread);
    }
}

void spac_together(void (*work)(void *), void *data, int threads) {
    if (threads < 2 || pthread_mutex_trylock(&turn)) {
        work(data);
        return;
    }
    pthread_mutex_lock(&lock);
    grow(threads - 1);
    work_now = work;
    data_now = data;
    places = threads - 1;
    number++;
    if (threads == 2)
        pthread_cond_signal(&work_there);
    else
        pthread_cond_broadcast(&work_there);
    pthread_mutex_unlock(&lock);
    work(data);
    pthread_mutex_lock(&lock);
    work_now = NULL;
    while (active) pthread_cond_wait(&work_over, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&turn);
}

/* A waker that finds nobody waiting skips the lock: the waiter has looked at *left after it said that it waits. */
void spac_wait(_Atomic int *left) {
    if (*left == 0) return;
    pthread_mutex_lock(&lock);
    waiting++;
    while (*left) pthread_cond_wait(&piece_done, &lock);
    waiting--;
    pthread_mutex_unlock(&lock);
}

void spac_wake(void) {
    if (waiting == 0) return;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&piece_done);
    pthread_mutex_unlock(&lock);
}
