/* A CUDA program without the toolkit: `probe LOADING COMMAND ARGUMENTS...` finds the driver's functions the way
 * LOADING says (linked, dlsym, global, address, thread, address1) and prints what COMMAND saw. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef int (*fn)();

static void *library;
static int (*get_address)(const char *, void **, int, u64, int *);
static int (*get_address_v1)(const char *, void **, int, u64);
/* 2: the functions of the per-thread default stream. */
static u64 address_flags;
static const char *loading;

#ifdef LINKED
extern int cuInit(), cuDeviceGet(), cuCtxCreate_v2(), cuMemAlloc_v2(), cuMemAllocManaged(), cuMemAllocPitch_v2(),
    cuMemFree_v2(), cuMemGetInfo_v2(), cuLaunchKernel(), cuModuleLoadData(), cuModuleGetFunction(), cuCtxSynchronize();
static struct { const char *name; fn function; } linked[] = {
#define F(n) {#n, (fn)n}
    F(cuInit), F(cuDeviceGet), F(cuCtxCreate_v2), F(cuMemAlloc_v2), F(cuMemAllocManaged), F(cuMemAllocPitch_v2),
    F(cuMemFree_v2), F(cuMemGetInfo_v2), F(cuLaunchKernel), F(cuModuleLoadData), F(cuModuleGetFunction),
    F(cuCtxSynchronize),
};
#endif

/* The function of an exported name; through cuGetProcAddress by the base name, as the CUDA runtime asks. */
static fn find(const char *name) {
#ifdef LINKED
  for (unsigned i = 0; i < sizeof linked / sizeof *linked; i++)
    if (!strcmp(linked[i].name, name)) return linked[i].function;
#endif
  void *found = NULL;
  if (get_address || get_address_v1) {
    char base[64];
    snprintf(base, sizeof base, "%s", name);
    char *suffix = strstr(base, "_v2");
    if (suffix) *suffix = 0;
    int status = 7;
    if (get_address_v1) {
      if (get_address_v1(base, &found, 11030, address_flags)) found = NULL;
      status = 0;
    } else {
      get_address(base, &found, 12080, address_flags, &status);
    }
    if (found && status != 0) { printf("status %d for %s\n", status, base); exit(3); }
  } else {
    found = dlsym(strcmp(loading, "global") ? library : RTLD_DEFAULT, name);
  }
  if (!found) { printf("no function %s\n", name); exit(3); }
  return (fn)found;
}
#define CALL(name, ...) (find(#name)(__VA_ARGS__))
#define MUST(name, ...) do { int code_ = CALL(name, __VA_ARGS__); \
    if (code_) { printf("%s failed: %d\n", #name, code_); exit(4); } } while (0)

struct array { size_t width, height; int format; unsigned channels; };
struct array3d { size_t width, height, depth; int format; unsigned channels, flags; };
static void *null_stream = NULL;

static void begin(int device) {
  MUST(cuInit, 0);
  u64 context;
  MUST(cuCtxCreate_v2, &context, 0, device);
}

/* Allocates `bytes` the way that `kind` names. */
static int allocate(const char *kind, size_t bytes, u64 *out) {
  size_t pitch;
  if (!strcmp(kind, "alloc")) return CALL(cuMemAlloc_v2, out, bytes);
  if (!strcmp(kind, "managed")) return CALL(cuMemAllocManaged, out, bytes, 1);
  if (!strcmp(kind, "pitch")) return CALL(cuMemAllocPitch_v2, out, &pitch, (size_t)512, bytes / 512, 4);
  if (!strcmp(kind, "async")) return CALL(cuMemAllocAsync, out, bytes, null_stream);
  if (!strcmp(kind, "create")) {
    int properties[8] = {1, 0, 1, 0, 0, 0, 0, 0};
    return CALL(cuMemCreate, out, bytes, properties, (u64)0);
  }
  if (!strcmp(kind, "array")) {
    struct array d = {bytes / 4096, 1024, 0x20, 1};
    return CALL(cuArrayCreate_v2, out, &d);
  }
  if (!strcmp(kind, "array3d")) {
    struct array3d d = {bytes / 4096, 32, 32, 0x01, 4, 0};
    return CALL(cuArray3DCreate_v2, out, &d);
  }
  if (!strcmp(kind, "line")) {
    struct array d = {bytes / 4, 0, 0x20, 1};
    return CALL(cuArrayCreate_v2, out, &d);
  }
  if (!strcmp(kind, "mipmapped")) {
    struct array3d d = {bytes / 1024, 256, 0, 0x20, 1, 0};
    return CALL(cuMipmappedArrayCreate, out, &d, 1);
  }
  if (!strcmp(kind, "pool")) {
    int properties[32] = {1, 0, 1, 0};
    u64 pool;
    MUST(cuMemPoolCreate, &pool, properties);
    return CALL(cuMemAllocFromPoolAsync, out, bytes, pool, null_stream);
  }
  exit(5);
}

static int release(const char *kind, u64 value) {
  if (!strcmp(kind, "async") || !strcmp(kind, "pool")) return CALL(cuMemFreeAsync, value, null_stream);
  if (!strcmp(kind, "create")) return CALL(cuMemRelease, value);
  if (!strncmp(kind, "array", 5) || !strcmp(kind, "line")) return CALL(cuArrayDestroy, value);
  if (!strcmp(kind, "mipmapped")) return CALL(cuMipmappedArrayDestroy, value);
  return CALL(cuMemFree_v2, value);
}

/* Halves of the limit: two fit, a third fits only after a free; a double free has no effect. */
static void halves(const char *kind, size_t half) {
  u64 a, b, c;
  int first = allocate(kind, half, &a), second = allocate(kind, half, &b), third = allocate(kind, half, &c);
  int freed = release(kind, a), again = allocate(kind, half, &c);
  int over = allocate(kind, half, &a);
  int freed_twice = release(kind, c) || release(kind, c);
  int one = allocate(kind, half, &c), two = allocate(kind, half, &a);
  printf("%d %d %d %d %d %d %d %d %d\n", first, second, third, freed, again, over, freed_twice != 0, one, two);
}

static u64 now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Launches for some milliseconds, synchronising every `batch` launches (0: never); prints launches and ns. */
static void spin(const char *kernel, int ms, int batch) {
  u64 module, function;
  MUST(cuModuleLoadData, &module, "");
  MUST(cuModuleGetFunction, &function, module, kernel);
  fn launch = find("cuLaunchKernel"), synchronize = find("cuCtxSynchronize");
  long launches = 0;
  u64 start = now(), end = start + ms * 1000000ull;
  for (; now() < end; launches++) {
    int code = launch(function, 1, 1, 1, 1, 1, 1, 0, null_stream, NULL, NULL);
    if (code) { printf("launch failed: %d\n", code); exit(4); }
    if (batch && launches % batch == 0) synchronize();
  }
  synchronize();
  printf("%ld %llu\n", launches, now() - start);
}

/* CPU time of this process, independent of other programs on the machine. */
static u64 cpu(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Processor time and time of one of `count` repetitions of the statement, in ns, after a tenth of them to warm up. */
#define REPEAT(count, statement) do { \
    for (long i_ = 0; i_ < (count) / 10; i_++) { statement; } \
    u64 cpu_ = cpu(), start_ = now(); \
    for (long i_ = 0; i_ < (count); i_++) { statement; } \
    printf("%.1f %.1f\n", (double)(cpu() - cpu_) / (count), (double)(now() - start_) / (count)); } while (0)
#define SAFE(call) do { int code_ = call; if (code_) { printf("%s: %d\n", #call, code_); exit(4); } } while (0)

/* The cost of a launch: of a kernel, synchronised every `batch` launches (0: never), or of a graph of four (-1). */
static void launches(const char *kernel, long count, int batch) {
  u64 module, function, graph, executable, stream;
  MUST(cuModuleLoadData, &module, "");
  MUST(cuModuleGetFunction, &function, module, kernel);
  MUST(cuStreamCreate, &stream, 0);
  fn launch = find("cuLaunchKernel"), synchronize = find("cuCtxSynchronize"), launch_graph = find("cuGraphLaunch");
  if (batch < 0) {
    MUST(cuStreamBeginCapture_v2, stream, 0);
    for (int i = 0; i < 4; i++) SAFE(launch(function, 1, 1, 1, 1, 1, 1, 0, (void *)stream, NULL, NULL));
    MUST(cuStreamEndCapture, stream, &graph);
    MUST(cuGraphInstantiateWithFlags, &executable, graph, (u64)0);
    REPEAT(count, SAFE(launch_graph(executable, (void *)stream)));
  } else if (batch == 0) {
    REPEAT(count, SAFE(launch(function, 1, 1, 1, 1, 1, 1, 0, (void *)stream, NULL, NULL)));
  } else {
    REPEAT(count, SAFE(launch(function, 1, 1, 1, 1, 1, 1, 0, (void *)stream, NULL, NULL));
                  if (i_ % batch == 0) synchronize());
  }
}

static size_t thread_bytes;
static void *thread(void *counter) {
  u64 address, context;
  MUST(cuCtxCreate_v2, &context, 0, 0);
  for (int i = 0; i < 500; i++) {
    if (allocate("alloc", thread_bytes, &address) == 0) {
      __atomic_add_fetch((long *)counter, 1, __ATOMIC_RELAXED);
      if (release("alloc", address)) exit(6);
    }
  }
  return NULL;
}

int main(int argc, char **argv) {
  loading = argv[1];
  if (strcmp(loading, "linked")) {
    library = dlopen("libcuda.so.1", RTLD_NOW | (strcmp(loading, "global") ? RTLD_LOCAL : RTLD_GLOBAL));
    if (!library) { printf("%s\n", dlerror()); return 2; }
  }
  if (!strcmp(loading, "address") || !strcmp(loading, "thread"))
    get_address = dlsym(library, "cuGetProcAddress_v2");
  if (!strcmp(loading, "thread")) address_flags = 2;
  if (!strcmp(loading, "address1")) get_address_v1 = dlsym(library, "cuGetProcAddress");
  const char *command = argv[2];
  setvbuf(stdout, NULL, _IONBF, 0);
  size_t bytes = argc > 4 ? strtoull(argv[4], NULL, 10) : 0;
  if (!strcmp(command, "halves")) {
    begin(0);
    halves(argv[3], bytes);
  } else if (!strcmp(command, "take")) { /* allocates and waits for the end of stdin */
    u64 address;
    begin(0);
    printf("%d\n", allocate(argv[3], bytes, &address));
    while (getchar() != EOF) {}
  } else if (!strcmp(command, "crash")) {
    u64 address;
    begin(0);
    printf("%d\n", allocate(argv[3], bytes, &address));
    abort();
  } else if (!strcmp(command, "info")) {
    size_t free_bytes, total, device_total;
    begin(0);
    MUST(cuMemGetInfo_v2, &free_bytes, &total);
    MUST(cuDeviceTotalMem_v2, &device_total, 0);
    size_t device1;
    MUST(cuDeviceTotalMem_v2, &device1, 1);
    printf("%zu %zu %zu %zu\n", free_bytes, total, device_total, device1);
  } else if (!strcmp(command, "again")) { /* one allocation at each line of stdin */
    u64 address;
    begin(0);
    while (getchar() != EOF) printf("%d\n", allocate(argv[3], bytes, &address));
  } else if (!strcmp(command, "fork")) {
    /* The child of a process without CUDA allocates; then the parent has room for the rest only. */
    int ready[2], done[2];
    char byte = 0;
    u64 address;
    if (pipe(ready) || pipe(done)) return 7;
    if (getenv("PROBE_TOUCH")) dlsym(RTLD_DEFAULT, "cuInit");
    pid_t child = fork();
    if (child == 0) {
      begin(0);
      byte = allocate("alloc", bytes, &address);
      if (write(ready[1], &byte, 1) != 1 || read(done[0], &byte, 1) < 0) return 8;
      _exit(0);
    }
    begin(0);
    if (read(ready[0], &byte, 1) != 1) return 9;
    int while_there = allocate("alloc", bytes, &address);
    kill(child, 9);
    waitpid(child, NULL, 0);
    printf("%d %d %d\n", byte, while_there, allocate("alloc", bytes, &address));
  } else if (!strcmp(command, "exec")) {
    u64 address;
    begin(0);
    int code = allocate("alloc", bytes, &address);
    if (code) return 10;
    execl(argv[0], argv[0], loading, "take", "alloc", argv[4], NULL);
  } else if (!strcmp(command, "threads")) {
    begin(0);
    thread_bytes = bytes;
    pthread_t threads[8];
    long done = 0;
    u64 address;
    for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, thread, &done);
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    printf("%d %d\n", done > 0, allocate("alloc", bytes * 3, &address));
  } else if (!strcmp(command, "mapped")) { /* VMM: memory counts until its last mapping is gone */
    u64 handle, address, other;
    begin(0);
    MUST(cuMemAddressReserve, &address, bytes, (size_t)0, (u64)0, (u64)0);
    int made = allocate("create", bytes, &handle);
    MUST(cuMemMap, address, bytes, (size_t)0, handle, (u64)0);
    MUST(cuMemRelease, handle);
    int while_mapped = allocate("create", bytes, &other);
    MUST(cuMemUnmap, address, bytes);
    printf("%d %d %d\n", made, while_mapped, allocate("create", bytes, &other));
  } else if (!strcmp(command, "keep")) { /* a pool that keeps freed memory is trimmed before a refusal */
    u64 pool, address, threshold = ~0ull;
    begin(0);
    MUST(cuDeviceGetDefaultMemPool, &pool, 0);
    MUST(cuMemPoolSetAttribute, pool, 4, &threshold);
    int first = allocate("async", bytes, &address);
    MUST(cuMemFreeAsync, address, null_stream);
    int reused = allocate("async", bytes, &address);
    MUST(cuMemFreeAsync, address, null_stream);
    printf("%d %d %d\n", first, reused, allocate("alloc", bytes, &address));
  } else if (!strcmp(command, "devices")) {
    /* Memory counts for its own device, whatever device the current context is of. Only the first one is limited. */
    u64 handle, context, address;
    int first[8] = {1, 0, 1, 0, 0, 0, 0, 0}, second[8] = {1, 0, 1, 1, 0, 0, 0, 0};
    begin(0);
    int on_second = CALL(cuMemCreate, &handle, bytes, second, (u64)0);
    int on_first = CALL(cuMemCreate, &handle, bytes, first, (u64)0);
    MUST(cuCtxCreate_v2, &context, 0, 1);
    int in_second = allocate("alloc", bytes, &address);
    printf("%d %d %d %d\n", on_second, on_first, in_second, CALL(cuMemCreate, &handle, bytes, first, (u64)0));
  } else if (!strcmp(command, "null")) {
    begin(0);
    size_t total = 0;
    int without_free = CALL(cuMemGetInfo_v2, NULL, &total);
    printf("%d %d %d\n", without_free, CALL(cuMemAlloc_v2, NULL, (size_t)1) != 0,
           CALL(cuMemCreate, &total, (size_t)1, NULL, (u64)0) != 0);
  } else if (!strcmp(command, "spin")) {
    begin(0);
    spin(argv[3], atoi(argv[4]), atoi(argv[5]));
  } else if (!strcmp(command, "launches")) {
    begin(0);
    launches(argv[3], atol(argv[4]), atoi(argv[5]));
  } else if (!strcmp(command, "allocations")) {
    /* Physical memory, which the simulated driver does not map: a mapping would dominate the cost. */
    u64 handle;
    int properties[8] = {1, 0, 1, 0, 0, 0, 0, 0};
    fn create = find("cuMemCreate"), release_memory = find("cuMemRelease");
    begin(0);
    REPEAT(atol(argv[5]), SAFE(create(&handle, bytes, properties, (u64)0)); SAFE(release_memory(handle)));
  } else if (!strcmp(command, "graph")) {
    u64 stream, module, function, graph, executable;
    begin(0);
    MUST(cuStreamCreate, &stream, 0);
    MUST(cuModuleLoadData, &module, "");
    MUST(cuModuleGetFunction, &function, module, argv[3]);
    MUST(cuStreamBeginCapture_v2, stream, 0);
    for (int i = 0; i < 4; i++)
      MUST(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, (void *)stream, NULL, NULL);
    MUST(cuStreamEndCapture, stream, &graph);
    MUST(cuGraphInstantiateWithFlags, &executable, graph, (u64)0);
    long launches = 0;
    u64 start = now();
    for (; now() < start + strtoull(argv[4], NULL, 10) * 1000000; launches++) MUST(cuGraphLaunch, executable, stream);
    if (find("cuCtxSynchronize")()) return 4;
    printf("%ld %llu\n", launches, now() - start);
  } else if (!strcmp(command, "nvml")) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    void *device;
    struct { u64 total, free, used; } memory;
    u64 address;
    begin(0);
    if (!nvml || allocate("alloc", bytes, &address)) return 11;
    ((fn)dlsym(nvml, "nvmlInit_v2"))();
    ((fn)dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &device);
    ((fn)dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(device, &memory);
    printf("%llu %llu %llu\n", memory.total, memory.free, memory.used);
  } else {
    return 12;
  }
  return 0;
}
