/* A stand-in for libnvidia-ml.so.1, so that the real nvidia-ml-py runs where there is no GPU.
 *
 * Read from the environment at every call; CALLS is a list like "energy,power:1" (":1": on device 1 only):
 *
 *   FAKE_NVML_DEVICES=4            how many devices there are; unset: nvmlInit says that no driver is loaded
 *   FAKE_NVML_INIT_ERROR=18        nvmlInit answers this code
 *   FAKE_NVML_LOST=2,3             these devices have fallen off the bus
 *   FAKE_NVML_LOST_WHILE=PATH      ... but only while this file exists, so that a test can lose one in mid-run
 *   FAKE_NVML_UNSUPPORTED=CALLS    these answer Not Supported
 *   FAKE_NVML_ABSENT=CALLS         these answer Function Not Found, as the binding says of an old driver
 *   FAKE_NVML_FAILING=CALLS        these answer Unknown Error
 *   FAKE_NVML_BLANK=CALLS          these answer NVML's "no value": a number of all ones
 *
 * CALLS: uuid name limit pci utilization memory memory_v2 temperature temperature_v power energy clock throttle
 *        throttle_old
 *
 * Device i is GPU-fa4e0000-0000-4000-8000-00000000000i: 50+i % busy, 16 GiB with 1+i used (and 0.5 reserved, which
 * version 1 of the memory call counts as used), 40+i °C, 100+10i W of 300, energy = power × the seconds since boot.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The binding's NVML_ERROR_ codes. */
enum { OK, UNINITIALIZED, BAD_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, NO_DRIVER = 9, NO_FUNCTION = 13, LOST = 15 };
enum { UNKNOWN = 999 };
enum { MOST_DEVICES = 64, MOST_NAMES = 32 };
#define GIB (1024ULL * 1024 * 1024)

struct device { unsigned index; };
typedef struct device *device_t;
static struct device devices[MOST_DEVICES];
static struct { char name[32]; unsigned calls[MOST_DEVICES]; } counters[MOST_NAMES];
static int users;

static unsigned device_count(void) {
    const char *text = getenv("FAKE_NVML_DEVICES");
    return text ? (unsigned)atoi(text) : 0;
}

/* Whether a list like "energy,power:1" holds this name, for this device. */
static int listed(const char *variable, const char *name, unsigned index) {
    char both[64], list[512];
    snprintf(both, sizeof both, "%s:%u", name, index);
    snprintf(list, sizeof list, "%s", getenv(variable) ? getenv(variable) : "");
    for (char *rest = list, *item; (item = strsep(&rest, ","));)
        if (!strcmp(item, name) || !strcmp(item, both)) return 1;
    return 0;
}

static int is_lost(unsigned index) {
    char name[16];
    const char *flag = getenv("FAKE_NVML_LOST_WHILE");
    snprintf(name, sizeof name, "%u", index);
    return (!flag || !access(flag, F_OK)) && listed("FAKE_NVML_LOST", name, index);
}

static void count_call(const char *name, unsigned index) {
    for (int i = 0; i < MOST_NAMES; i++) {
        if (!counters[i].name[0]) snprintf(counters[i].name, sizeof counters[i].name, "%s", name);
        if (!strcmp(counters[i].name, name)) { counters[i].calls[index]++; return; }
    }
}

/* For tests: how often a call reached a device since NVML was started. */
unsigned fake_nvml_calls(const char *name, unsigned index) {
    for (int i = 0; i < MOST_NAMES; i++)
        if (!strcmp(counters[i].name, name)) return counters[i].calls[index];
    return 0;
}

static int trouble(const char *name, device_t device) {
    if (!users) return UNINITIALIZED;
    count_call(name, device->index);
    if (is_lost(device->index)) return LOST;
    if (listed("FAKE_NVML_UNSUPPORTED", name, device->index)) return NOT_SUPPORTED;
    if (listed("FAKE_NVML_ABSENT", name, device->index)) return NO_FUNCTION;
    if (listed("FAKE_NVML_FAILING", name, device->index)) return UNKNOWN;
    return OK;
}

/* Either the number or, where the environment says so, NVML's "no value" (cut to the width of the field). */
static uint64_t number(const char *name, device_t device, uint64_t value) {
    return listed("FAKE_NVML_BLANK", name, device->index) ? UINT64_MAX : value;
}

#define STOP_ON_TROUBLE(name, device) \
    do { int code_ = trouble(name, device); if (code_) return code_; } while (0)

#define ANSWER(function, type, name, value) \
    int function(device_t device, type *answer) { \
        STOP_ON_TROUBLE(name, device); \
        *answer = (type)number(name, device, value); \
        return OK; \
    }

int nvmlInitWithFlags(unsigned flags) {
    const char *error = getenv("FAKE_NVML_INIT_ERROR");
    (void)flags;
    if (error) return atoi(error);
    if (!getenv("FAKE_NVML_DEVICES")) return NO_DRIVER;
    if (!users++) memset(counters, 0, sizeof counters);
    return OK;
}

int nvmlShutdown(void) { return users ? (users--, OK) : UNINITIALIZED; }

const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.00.00"); return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = device_count(); return users ? OK : UNINITIALIZED; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    if (!users) return UNINITIALIZED;
    if (index >= device_count()) return BAD_ARGUMENT;
    if (is_lost(index)) return LOST;
    devices[index].index = index;
    *device = &devices[index];
    return OK;
}

int nvmlDeviceGetUUID(device_t device, char *text, unsigned size) {
    STOP_ON_TROUBLE("uuid", device);
    snprintf(text, size, "GPU-fa4e0000-0000-4000-8000-%012u", device->index);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    unsigned index;
    if (!users) return UNINITIALIZED;
    if (sscanf(uuid, "GPU-fa4e0000-0000-4000-8000-%12u", &index) != 1 || index >= device_count()) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlDeviceGetName(device_t device, char *text, unsigned size) {
    STOP_ON_TROUBLE("name", device);
    snprintf(text, size, "Stand-in GPU");
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem_id; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(device_t device, struct pci *pci) {
    STOP_ON_TROUBLE("pci", device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 16 + device->index);
    return OK;
}

struct rates { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(device_t device, struct rates *rates) {
    STOP_ON_TROUBLE("utilization", device);
    rates->gpu = (unsigned)number("utilization", device, 50 + device->index);
    rates->memory = (unsigned)number("utilization", device, 20 + device->index);
    return OK;
}

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory) {
    STOP_ON_TROUBLE("memory", device);
    memory->total = 16 * GIB;
    memory->used = number("memory", device, (1 + device->index) * GIB + GIB / 2);
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *memory) {
    STOP_ON_TROUBLE("memory_v2", device);
    memory->total = 16 * GIB;
    memory->reserved = GIB / 2;
    memory->used = number("memory_v2", device, (1 + device->index) * GIB);
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}

int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *celsius) {
    (void)sensor;
    STOP_ON_TROUBLE("temperature", device);
    *celsius = (unsigned)number("temperature", device, 40 + device->index);
    return OK;
}

struct temperature { unsigned version; int sensor, celsius; };

int nvmlDeviceGetTemperatureV(device_t device, struct temperature *temperature) {
    STOP_ON_TROUBLE("temperature_v", device);
    temperature->celsius = 40 + (int)device->index;
    return OK;
}

int nvmlDeviceGetClockInfo(device_t device, int type, unsigned *mhz) {
    STOP_ON_TROUBLE("clock", device);
    *mhz = (unsigned)number("clock", device, type == 2 ? 1593 : 1500); /* 2: memory */
    return OK;
}

static double seconds_since_boot(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static unsigned power_mw(device_t device) { return 100000 + 10000 * device->index; }

ANSWER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "limit", 300000)
ANSWER(nvmlDeviceGetPowerUsage, unsigned, "power", power_mw(device))
ANSWER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "energy", power_mw(device) * seconds_since_boot())
/* 4: held back by the software power cap */
ANSWER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 4)
ANSWER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle_old", 4)
