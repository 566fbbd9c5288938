/* Stands in for NCCL in a process that trains: opens the plugin as NCCL does, calls its tables of functions, and picks
 * an algorithm from the costs by the rules of both generations of NCCL. Reads commands, answers each with one line that
 * begins with "ok" or "err". A crash ends it, and that is what a test then sees. */
#define _GNU_SOURCE
#include "../../include/flexcomm_nccl_tuner.h"
#include "tuner_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_CONTEXTS = 64, MOST_FLOATS = 1024, MOST_LINES = 256, IGNORE = -1 };

static void *library, *second;
static int version;
static void *table_of_functions;
static void *contexts[MOST_CONTEXTS];
static int opened;
static int32_t (*prefer)(int32_t, int32_t, uint64_t);
static int32_t (*read_state)(void *, size_t);

static char lines[MOST_LINES][512];
static int said;
static pthread_mutex_t saying = PTHREAD_MUTEX_INITIALIZER;

static void logger(int level, unsigned long subsystems, const char *file, int line, const char *format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  (void)line;
  pthread_mutex_lock(&saying);
  if (said < MOST_LINES) snprintf(lines[said++], sizeof lines[0], "%d %lu %s: %s", level, subsystems, file, text);
  pthread_mutex_unlock(&saying);
}

/* As src/plugin/plugin_open.cc does it: the name as it is, then between "libnccl-tuner-" and ".so". */
static void *open_like_nccl(const char *name) {
  char full[512];
  void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  size_t length = strlen(name);
  int whole = strncmp(name, "lib", 3) == 0 && length >= 3 && strcmp(name + length - 3, ".so") == 0;
  if (handle || strchr(name, '/') || whole) return handle;
  snprintf(full, sizeof full, "libnccl-tuner-%s.so", name);
  return dlopen(full, RTLD_NOW | RTLD_LOCAL);
}

static void open_plugin(const char *name) {
  library = open_like_nccl(name);
  if (!library) {
    printf("err %s\n", dlerror());
    return;
  }
  *(void **)&prefer = dlsym(library, "flexcomm_tuner_prefer");
  *(void **)&read_state = dlsym(library, "flexcomm_tuner_state");
  if (!prefer || !read_state) printf("err no control functions\n");
  else printf("ok\n");
}

static void use(int wanted) {
  char symbol[64];
  snprintf(symbol, sizeof symbol, "ncclTunerPlugin_v%d", wanted);
  table_of_functions = dlsym(library, symbol);
  version = wanted;
  /* The name comes first in every version. */
  if (!table_of_functions) printf("err no %s\n", symbol);
  else printf("ok %s\n", *(const char **)table_of_functions);
}

static nccl_result call_init(size_t ranks, size_t nodes, nccl_logger log, void **context, void *domains, void *constants) {
  switch (version) {
    case 2: return ((tuner_v2 *)table_of_functions)->init(ranks, nodes, log, context);
    case 3: return ((tuner_v3 *)table_of_functions)->init(ranks, nodes, log, context);
    case 4: return ((tuner_v4 *)table_of_functions)->init(ranks, nodes, log, context);
    case 5: return ((tuner_v5 *)table_of_functions)->init(context, 0xfeed, ranks, nodes, log, domains, constants);
    case 6: return ((tuner_v6 *)table_of_functions)->init(context, 0xfeed, ranks, nodes, log, domains, constants);
    default: return ((tuner_v7 *)table_of_functions)->init(context, 0xfeed, ranks, nodes, log, domains, constants);
  }
}

static nccl_result call_finish(void *context) {
  switch (version) {
    case 2: return ((tuner_v2 *)table_of_functions)->destroy(context);
    case 3: return ((tuner_v3 *)table_of_functions)->destroy(context);
    case 4: return ((tuner_v4 *)table_of_functions)->destroy(context);
    case 5: return ((tuner_v5 *)table_of_functions)->finalize(context);
    case 6: return ((tuner_v6 *)table_of_functions)->finalize(context);
    default: return ((tuner_v7 *)table_of_functions)->finalize(context);
  }
}

typedef struct {
  void *context;
  int func;
  size_t bytes;
  float *costs;
  int algorithms, protocols;
  int *algorithm, *protocol, *channels;
} question;

static nccl_result call_info(const question *q) {
  float **costs = (float **)q->costs;
  switch (version) {
    case 2:
      return ((tuner_v2 *)table_of_functions)
        ->info(q->context, q->func, q->bytes, 0, 1, 1, q->algorithm, q->protocol, q->channels);
    case 3:
      return ((tuner_v3 *)table_of_functions)
        ->info(q->context, q->func, q->bytes, 1, costs, q->algorithms, q->protocols, q->channels);
    case 4:
      return ((tuner_v4 *)table_of_functions)
        ->info(q->context, q->func, q->bytes, 1, costs, q->algorithms, q->protocols, 0, q->channels);
    case 5:
      return ((tuner_v5 *)table_of_functions)
        ->info(q->context, q->func, q->bytes, 1, costs, q->algorithms, q->protocols, 0, q->channels);
    case 6:
      return ((tuner_v6 *)table_of_functions)
        ->info(q->context, q->func, q->bytes, 1, costs, q->algorithms, q->protocols, 0, q->channels);
    default:
      return ((tuner_v7 *)table_of_functions)
        ->info(q->context, q->func, q->bytes, 1, costs, q->algorithms, q->protocols, 0, q->channels);
  }
}

static void init(size_t ranks, size_t nodes) {
  constants_v7 constants, before;
  nvl_domains domains = {1, 2, 3};
  void *context = NULL;
  memset(&constants, 0x5a, sizeof constants);
  before = constants;
  nccl_result result = call_init(ranks, nodes, logger, &context, &domains, &constants);
  if (result) printf("err init answers %d\n", result);
  else if (!context) printf("err init gave no context\n");
  else if (memcmp(&before, &constants, sizeof constants)) printf("err init changed the constants\n");
  else if (domains.domains != 1 || domains.min_ranks != 2 || domains.max_ranks != 3) printf("err init changed domains\n");
  else if (version >= 6 && ((tuner_v6 *)table_of_functions)->chunk_size) printf("err it changes chunks\n");
  else {
    contexts[opened] = context;
    printf("ok %d\n", opened++);
  }
}

/* NCCL 2.22 to 2.30: the first of the cheapest entries that are not negative. */
static int old_choice(const float *costs, int entries) {
  int best = -1;
  for (int i = 0; i < entries; i++)
    if (costs[i] >= 0 && (best < 0 || costs[i] < costs[best])) best = i;
  return best;
}

/* After 2.30: the cheapest of the entries that were allowed before the plugin was asked, whatever they are now, looked
 * through from the last one. */
static int new_choice(const float *before, const float *costs, int entries) {
  int best = -1;
  for (int i = entries - 1; i >= 0; i--)
    if (before[i] != IGNORE && (best < 0 || costs[i] < costs[best])) best = i;
  return best;
}

/* Floats that end where memory that may be touched ends, and begin after a word that must stay. */
static float *at_the_edge(int floats) {
  static char *pages;
  size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (MOST_FLOATS * sizeof(float) + page) / page * page;
  if (!pages) {
    pages = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + room, page, PROT_NONE)) abort();
  }
  return (float *)(pages + room) - floats;
}

static int context_of(const char *word, void **context) {
  if (!strcmp(word, "null")) *context = NULL;
  else if (!strcmp(word, "wild")) *context = (void *)0xdeadbeefdeadbeefu;
  else {
    int number = atoi(word);
    if (number < 0 || number >= opened) return 0;
    *context = contexts[number];
  }
  return 1;
}

/* CONTEXT FUNC BYTES ALGORITHMS PROTOCOLS COST... */
static void collective(char *words) {
  char *save = NULL, *word;
  question q = {0};
  float before[MOST_FLOATS];
  int floats = 0, algorithm = -1, protocol = -1, channels = 0;
  if (!context_of(strtok_r(words, " ", &save), &q.context)) {
    printf("err no such context\n");
    return;
  }
  q.func = atoi(strtok_r(NULL, " ", &save));
  q.bytes = strtoull(strtok_r(NULL, " ", &save), NULL, 10);
  q.algorithms = atoi(strtok_r(NULL, " ", &save));
  q.protocols = atoi(strtok_r(NULL, " ", &save));
  while ((word = strtok_r(NULL, " ", &save)) && floats < MOST_FLOATS) before[floats++] = strtof(word, NULL);
  float *costs = at_the_edge(floats);
  if (floats) memcpy(costs, before, (size_t)floats * sizeof *costs);
  q.costs = costs;
  q.algorithm = &algorithm;
  q.protocol = &protocol;
  q.channels = &channels;
  nccl_result result = call_info(&q);
  int old = old_choice(costs, floats), new = new_choice(before, costs, floats), changed = 0;
  for (int i = 0; i < floats; i++) changed += costs[i] != before[i];
  if (version == 2 && algorithm >= 0 && protocol >= 0) old = new = algorithm * PROTOS + protocol;
  else if (algorithm != -1 || protocol != -1) result = -2;
  if (result) printf("err getCollInfo answers %d\n", result);
  else if (channels) printf("err it changed the channels\n");
  else
    printf("ok old %d/%d new %d/%d changed %d\n", old < 0 ? -1 : old / PROTOS, old < 0 ? -1 : old % PROTOS,
           new < 0 ? -1 : new / PROTOS, new < 0 ? -1 : new % PROTOS, changed);
}

static void *collective_thread(void *words) {
  collective(words);
  return NULL;
}

/* Everything that may be null is. */
static void nulls(void) {
  float costs[ALGOS * PROTOS], copy[ALGOS * PROTOS];
  int algorithm = 5, protocol = 5;
  for (int i = 0; i < ALGOS * PROTOS; i++) costs[i] = copy[i] = (float)(100 - i);
  question all_null = {.context = contexts[0], .func = FUNC_ALL_REDUCE, .bytes = 1 << 20, .algorithms = ALGOS, .protocols = PROTOS};
  question odd = all_null, no_protocol = all_null, no_channels = all_null;
  odd.costs = (float *)((char *)costs + 1);
  no_protocol.algorithm = &algorithm;
  no_channels.algorithm = &algorithm;
  no_channels.protocol = &protocol;
  no_channels.costs = costs;
  void *context = NULL;
  nccl_result results = 0;
  results |= call_init(4, 2, NULL, NULL, NULL, NULL);
  results |= call_init(4, 2, logger, NULL, NULL, NULL);
  results |= call_init(4, 2, NULL, &context, NULL, NULL);
  question quiet = no_channels;
  quiet.context = context;
  results |= call_info(&all_null);
  results |= call_info(&odd);
  results |= call_info(&no_protocol);
  if (algorithm != 5) results |= 64;
  if (memcmp(costs, copy, sizeof costs)) results |= 128;
  results |= call_info(&no_channels);
  results |= call_info(&quiet);
  results |= call_finish(context);
  results |= call_finish(NULL);
  printf(results ? "err %d\n" : "ok\n", results);
}

/* Each thread prefers its own shape and must get it, whatever the others prefer at the same time. */
static void *hammer_thread(void *argument) {
  long wrong = 0, number = (long)argument;
  for (int i = 0; i < 20000; i++) {
    float costs[ALGOS * PROTOS];
    int channels = 0, algorithm = -1, protocol = -1, wanted = (int)((number + i / 7) % 2);
    for (int j = 0; j < ALGOS * PROTOS; j++) costs[j] = j < 6 ? (float)(40 + (j * 7 + i) % 11) : IGNORE;
    question q = {contexts[0], FUNC_ALL_REDUCE, 1 << 20, costs, ALGOS, PROTOS, &algorithm, &protocol, &channels};
    if (prefer(FLEXCOMM_TUNER_THREAD, wanted, (uint64_t)i) || call_info(&q)) wrong++;
    int got = version == 2 ? algorithm : old_choice(costs, ALGOS * PROTOS) / PROTOS;
    wrong += got != wanted;
  }
  return (void *)wrong;
}

static void hammer(void) {
  pthread_t threads[4];
  long wrong = 0;
  for (long i = 0; i < 4; i++)
    if (pthread_create(&threads[i], NULL, hammer_thread, (void *)i)) abort();
  for (int i = 0; i < 4; i++) {
    void *result;
    pthread_join(threads[i], &result);
    wrong += (long)result;
  }
  printf(wrong ? "err %ld wrong\n" : "ok\n", wrong);
}

static void state(void) {
  flexcomm_tuner_state_t s;
  memset(&s, 0, sizeof s);
  if (read_state(&s, sizeof s) != (int)sizeof s) printf("err another size\n");
  else
    printf("ok thread %d process %d communicators %llu asked %llu here %llu steered %llu same %llu left %llu\n",
           s.thread_algorithm, s.process_algorithm, (unsigned long long)s.communicators, (unsigned long long)s.asked,
           (unsigned long long)s.asked_here, (unsigned long long)s.steered, (unsigned long long)s.same,
           (unsigned long long)s.left);
}

static void tell_logs(void) {
  printf("ok");
  for (int i = 0; i < said; i++) printf(" | %s", lines[i]);
  printf("\n");
  said = 0;
}

static void obey(char *line) {
  char *rest = strchr(line, ' ');
  if (rest) *rest++ = 0;
  else rest = line + strlen(line);
  void *context;
  int scope, algorithm;
  size_t a, b;
  unsigned long long step;
  if (!strcmp(line, "open")) open_plugin(rest);
  else if (!strcmp(line, "hold")) printf((second = dlopen(rest, RTLD_NOW | RTLD_NOLOAD)) ? "ok\n" : "err not open\n");
  else if (!strcmp(line, "close")) printf(dlclose(library) ? "err\n" : "ok\n");
  else if (!strcmp(line, "use")) use(atoi(rest));
  else if (!strcmp(line, "init") && sscanf(rest, "%zu %zu", &a, &b) == 2) init(a, b);
  else if (!strcmp(line, "coll")) collective(rest);
  else if (!strcmp(line, "thread")) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, collective_thread, rest)) abort();
    pthread_join(thread, NULL);
  } else if (!strcmp(line, "finish") && context_of(rest, &context)) printf(call_finish(context) ? "err\n" : "ok\n");
  else if (!strcmp(line, "prefer") && sscanf(rest, "%d %d %llu", &scope, &algorithm, &step) == 3)
    printf("ok %d\n", prefer(scope, algorithm, step));
  else if (!strcmp(line, "nulls")) nulls();
  else if (!strcmp(line, "hammer")) hammer();
  else if (!strcmp(line, "state")) state();
  else if (!strcmp(line, "logs")) tell_logs();
  else printf("err what is %s %s\n", line, rest);
}

int main(void) {
  static char line[1 << 16];
  setvbuf(stdout, NULL, _IOLBF, 0);
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    obey(line);
  }
  return 0;
}
