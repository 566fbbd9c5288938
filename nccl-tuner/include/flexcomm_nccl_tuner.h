/* What a process that trains tells libnccl-tuner-flexcomm.so. Find the functions by dlsym in the very file that
 * NCCL_TUNER_PLUGIN names: a copy of it elsewhere is another plugin. See the README beside this folder. */
#ifndef FLEXCOMM_NCCL_TUNER_H
#define FLEXCOMM_NCCL_TUNER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FLEXCOMM_TUNER_THREAD = 0, FLEXCOMM_TUNER_PROCESS = 1 };
enum { FLEXCOMM_TUNER_NONE = -1, FLEXCOMM_TUNER_TREE = 0, FLEXCOMM_TUNER_RING = 1 };

/* What allreduces prefer from now on: those that the calling thread enqueues (FLEXCOMM_TUNER_THREAD), or those of all
 * threads that have no preference of their own (FLEXCOMM_TUNER_PROCESS). `step` is the training step, for the log.
 * Call it with what the ranks agreed on for the step whose allreduce comes next, on every rank alike: NCCL does not
 * compare the ranks' choices, and ranks that differ wait for each other for ever.
 * 0, or -1 when an argument is unknown; then nothing has changed. */
int32_t flexcomm_tuner_prefer(int32_t scope, int32_t algorithm, uint64_t step);

/* Allreduces are counted since the plugin was loaded. */
typedef struct {
  int32_t thread_algorithm;  /* of the calling thread */
  int32_t process_algorithm;
  uint64_t communicators; /* with more than one rank, opened by NCCL with this plugin and not closed */
  uint64_t asked;         /* allreduces that NCCL asked about */
  uint64_t asked_here;    /* of these, by the calling thread */
  uint64_t steered;       /* would have run otherwise */
  uint64_t same;          /* would have run as preferred anyway */
  uint64_t left;          /* ran as NCCL chose although something was preferred; NCCL's log says why */
} flexcomm_tuner_state_t;

/* Writes the state, or as much of it as `bytes` hold. The bytes of the whole, or -1 when `out` is null. */
int32_t flexcomm_tuner_state(void *out, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
