/* The tuner interface as NCCL publishes it (src/include/plugin/tuner/tuner_v2.h to tuner_v7.h), written down a second
 * time and in the language in which NCCL speaks it: what the plugin believes about the layout is not asked here. */
#ifndef TUNER_ABI_H
#define TUNER_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int nccl_result;
typedef void (*nccl_logger)(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);

enum { FUNC_BROADCAST, FUNC_REDUCE, FUNC_ALL_GATHER, FUNC_REDUCE_SCATTER, FUNC_ALL_REDUCE };
enum { ALGOS = 7, PROTOS = 3, LINKS = 3, SCALES = 3 };

typedef struct {
  int domains, min_ranks, max_ranks;
} nvl_domains;

/* Version 5 has 4 generations of GPUs, version 7 has 5. The plugin must not touch either. */
typedef struct {
  double base_latencies[ALGOS][PROTOS];
  double hardware_latencies[LINKS][ALGOS][PROTOS];
  double bandwidths[5][4][SCALES];
} constants_v5;

typedef struct {
  double base_latencies[ALGOS][PROTOS];
  double hardware_latencies[LINKS][ALGOS][PROTOS];
  double bandwidths[5][5][SCALES];
} constants_v7;

typedef struct {
  const char *name;
  nccl_result (*init)(size_t ranks, size_t nodes, nccl_logger log, void **context);
  nccl_result (*info)(void *context, int func, size_t bytes, int collnet, int nvls, int operations, int *algorithm,
                      int *protocol, int *channels);
  nccl_result (*destroy)(void *context);
} tuner_v2;

typedef struct {
  const char *name;
  nccl_result (*init)(size_t ranks, size_t nodes, nccl_logger log, void **context);
  nccl_result (*info)(void *context, int func, size_t bytes, int operations, float **costs, int algorithms,
                      int protocols, int *channels);
  nccl_result (*destroy)(void *context);
} tuner_v3;

typedef struct {
  const char *name;
  nccl_result (*init)(size_t ranks, size_t nodes, nccl_logger log, void **context);
  nccl_result (*info)(void *context, int func, size_t bytes, int operations, float **costs, int algorithms,
                      int protocols, int registered, int *channels);
  nccl_result (*destroy)(void *context);
} tuner_v4;

typedef struct {
  const char *name;
  nccl_result (*init)(void **context, uint64_t communicator, size_t ranks, size_t nodes, nccl_logger log,
                      nvl_domains *domains, constants_v5 *constants);
  nccl_result (*info)(void *context, int func, size_t bytes, int operations, float **costs, int algorithms,
                      int protocols, int registered, int *channels);
  nccl_result (*finalize)(void *context);
} tuner_v5;

typedef struct {
  const char *name;
  nccl_result (*init)(void **context, uint64_t communicator, size_t ranks, size_t nodes, nccl_logger log,
                      nvl_domains *domains, constants_v5 *constants);
  nccl_result (*info)(void *context, int func, size_t bytes, int operations, float **costs, int algorithms,
                      int protocols, int registered, int *channels);
  nccl_result (*finalize)(void *context);
  nccl_result (*chunk_size)(void *context, int func, size_t bytes, int algorithm, int protocol, int channels,
                            size_t *chunk);
} tuner_v6;

typedef struct {
  const char *name;
  nccl_result (*init)(void **context, uint64_t communicator, size_t ranks, size_t nodes, nccl_logger log,
                      nvl_domains *domains, constants_v7 *constants);
  nccl_result (*info)(void *context, int func, size_t bytes, int operations, float **costs, int algorithms,
                      int protocols, int registered, int *channels);
  nccl_result (*finalize)(void *context);
  nccl_result (*chunk_size)(void *context, int func, size_t bytes, int algorithm, int protocol, int channels,
                            size_t *chunk);
} tuner_v7;

_Static_assert(sizeof(tuner_v2) == 4 * sizeof(void *) && sizeof(tuner_v5) == 4 * sizeof(void *), "four pointers");
_Static_assert(sizeof(tuner_v6) == 5 * sizeof(void *) && sizeof(tuner_v7) == 5 * sizeof(void *), "five pointers");
_Static_assert(offsetof(tuner_v5, init) == sizeof(void *) && offsetof(tuner_v5, info) == 2 * sizeof(void *), "order");
_Static_assert(offsetof(tuner_v7, finalize) == 3 * sizeof(void *), "order");
_Static_assert(sizeof(constants_v5) == 1152 && sizeof(constants_v7) == 1272, "NCCL's tables of doubles");

#endif
