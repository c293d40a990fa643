/* One pool of threads for the process. They sleep on a condition variable between calls and never spin. */
#ifndef SPAC_POOL_H
#define SPAC_POOL_H

/* Run work(data) on the calling thread and on up to threads - 1 others; return when all that began have ended. `work`
 * takes pieces until none is left, so it does not matter how many take part: if the pool is busy with another caller, or
 * no thread can be made, it is the calling thread alone. */
void spac_together(void (*work)(void *), void *data, int threads);

/* Sleep until *left is 0; whoever makes it 0 calls spac_wake. */
void spac_wait(_Atomic int *left);
void spac_wake(void);

#endif
