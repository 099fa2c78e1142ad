/* A stand-in for libnvidia-ml.so.1, so that the real nvidia-ml-py runs where there is no GPU.
 *
 * Read from the environment at every call. DEVICE is "1", or "1.0" for the first slice of card 1; CALLS is a list like
 * "energy,power:1,memory:1.0" (":1": on that device only):
 *
 *   FAKE_NVML_DEVICES=4            how many devices there are; unset: nvmlInit says that no driver is loaded
 *   FAKE_NVML_INIT_ERROR=18        nvmlInit answers this code
 *   FAKE_NVML_LOST=2,3             these devices have fallen off the bus, with their slices
 *   FAKE_NVML_LOST_WHILE=PATH      ... but only while this file exists, so that a test can lose one in mid-run
 *   FAKE_NVML_MIG=0:2,1:0          card 0 is in MIG mode with two slices, card 1 with none
 *   FAKE_NVML_UNSUPPORTED=CALLS    these answer Not Supported
 *   FAKE_NVML_FORBIDDEN=CALLS      these answer Insufficient Permissions
 *   FAKE_NVML_ABSENT=CALLS         these answer Function Not Found, as the binding says of an old driver
 *   FAKE_NVML_FAILING=CALLS        these answer Unknown Error
 *   FAKE_NVML_ANSWERING=CALLS      these answer a code of NVML: "power:1=25"
 *   FAKE_NVML_BLANK=CALLS          these answer NVML's "no value": a number of all ones (GPM: not a number)
 *   FAKE_NVML_SLOW=CALLS           these take their time, in ms: "energy=20,power:1=3"; by fake_nvml_took_s() alone if
 *                                  NOW_S is set
 *   FAKE_NVML_NOW_S=12.5           what time it is in the library; unset: seconds since boot
 *   FAKE_NVML_WORKED_S=3.2         for how long every device has worked until now; unset: (50+i) % of the time
 *   FAKE_NVML_PROCESSES=0:4711:512:30+50:cg,1:99:-:-
 *                                  DEVICE:pid:MiB:SM %:kinds; "-": not available; "30+50": two samples, 1 s apart;
 *                                  kinds: c compute (if left out), g graphics, m client of MPS; a path: what is in it
 *   FAKE_NVML_CAPABILITY=6.1       the compute capability of every device; unset: 9.0
 *   FAKE_NVML_COMPUTE_MODE=3       of every device (3: exclusive); unset: 0, default
 *   FAKE_NVML_XID=0:79,1.0:31      DEVICE:Xid, to be reported once each to a listening event set
 *   FAKE_NVML_ECC=3                uncorrected errors of every device; unset: 0
 *   FAKE_NVML_SENT_BYTES=5         what the counter of PCIe out says; unset: by the time
 *   FAKE_NVML_MOST_FIELDS=197      the last field this driver knows; unset: all
 *
 * CALLS: uuid name limit pci threshold mig_mode utilization memory memory_v2 temperature temperature_v power energy
 *        clock throttle throttle_old fan encoder decoder ecc processes processes_v2 graphics graphics_v2
 *        mps mps_v2 capability compute_mode process_utilization fields pcie (the values within fields) gpm gpm_sample
 *        gpm_metrics gpm_occupancy (that metric alone) events wait
 *
 * Device i is GPU-fa4e0000-0000-4000-8000-00000000000i: 50+i % busy, 16 GiB with 1+i used (and 0.5 reserved, which
 * version 1 of the memory call counts as used), 40+i °C (slows down at 87), 100+10i W of 300, energy = power × time,
 * PCIe 1+i MB/s out and 2+i MB/s in, fan 30+i %, encoder 5 %, decoder 7 %. GPM: SMs at 0.9, occupancy at 0.5, tensor
 * at 0.25, DRAM at 0.2 of the share of time in which it worked.
 * Slice s of it is MIG-fa4e0000-0000-4000-800s-00000000000i, gpu instance 7+s: 4 GiB with (1+s)/4 used. Power,
 * temperature and energy of a slice are those of the whole card.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The binding's NVML_ERROR_ codes. */
enum { OK, UNINITIALIZED, BAD_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9 };
enum { TIMEOUT = 10, NO_FUNCTION = 13, LOST = 15, NO_DATA = 21, UNKNOWN = 999 };
enum { MOST_DEVICES = 64, MOST_SLICES = 4, MOST_NAMES = 64, MOST_PROCESSES = 32, WHOLE = -1 };
#define GIB (1024ULL * 1024 * 1024)
#define ANY_INSTANCE 0xFFFFFFFFu
#define XID_EVENT 8ULL

struct device { unsigned index; int slice; };
typedef struct device *device_t;
static struct device cards[MOST_DEVICES], slices[MOST_DEVICES][MOST_SLICES];
static struct { char name[32]; unsigned calls[MOST_DEVICES]; } counters[MOST_NAMES];
static int users, live_samples, live_sets;
static double took_s;
static unsigned long long last_seen[MOST_DEVICES];
static char xids_told[256]; /* the list of Xids that is being told */
static unsigned xids_taken;

/* ---- the environment ------------------------------------------------------------------------------------------- */

static unsigned device_count(void) {
    const char *text = getenv("FAKE_NVML_DEVICES");
    return text ? (unsigned)atoi(text) : 0;
}

static double number_or(const char *variable, double otherwise) {
    const char *text = getenv(variable);
    return text ? atof(text) : otherwise;
}

static const char *place(device_t device) {
    static char text[32];
    if (device->slice == WHOLE) snprintf(text, sizeof text, "%u", device->index);
    else snprintf(text, sizeof text, "%u.%d", device->index, device->slice);
    return text;
}

/* What stands behind "name" or "name:DEVICE" in a list, after an optional "="; NULL: it is not listed. */
static const char *listed(const char *variable, const char *name, device_t device) {
    static char list[1024];
    const char *text = getenv(variable);
    char both[64];
    if (!text || !*text) return NULL;
    snprintf(both, sizeof both, "%s:%s", name, place(device));
    snprintf(list, sizeof list, "%s", text);
    for (char *rest = list, *item; (item = strsep(&rest, ","));) {
        char *value = strchr(item, '=');
        if (value) *value++ = 0;
        if (!strcmp(item, name) || !strcmp(item, both)) return value ? value : "";
    }
    return NULL;
}

static int is_lost(unsigned index) {
    const char *flag = getenv("FAKE_NVML_LOST_WHILE");
    char name[16];
    snprintf(name, sizeof name, "%u", index);
    return (!flag || !access(flag, F_OK)) && listed("FAKE_NVML_LOST", name, &cards[index]);
}

/* How many slices a card has; -1: it is not in MIG mode. */
static int slice_count(unsigned index) {
    const char *text = getenv("FAKE_NVML_MIG");
    unsigned card, count;
    for (; text && sscanf(text, "%u:%u", &card, &count) == 2; text = strchr(text, ','), text = text ? text + 1 : text)
        if (card == index) return (int)count;
    return -1;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return number_or("FAKE_NVML_NOW_S", (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
}

static double worked_s(unsigned index) { return number_or("FAKE_NVML_WORKED_S", (0.50 + 0.01 * index) * now_s()); }

/* ---- every call ------------------------------------------------------------------------------------------------ */

static void count_call(const char *name, unsigned index) {
    for (int i = 0; i < MOST_NAMES; i++) {
        if (!counters[i].name[0]) snprintf(counters[i].name, sizeof counters[i].name, "%s", name);
        if (!strcmp(counters[i].name, name)) { counters[i].calls[index]++; return; }
    }
}

/* For tests: how often a call reached a card or its slices since NVML was started. */
unsigned fake_nvml_calls(const char *name, unsigned index) {
    for (int i = 0; i < MOST_NAMES; i++)
        if (!strcmp(counters[i].name, name)) return counters[i].calls[index];
    return 0;
}

/* For tests: what has been allocated and not freed, and since when samples of processes were asked for. */
int fake_nvml_live_samples(void) { return live_samples; }
int fake_nvml_live_sets(void) { return live_sets; }
double fake_nvml_took_s(void) { return took_s; }
unsigned long long fake_nvml_last_seen(unsigned index) { return last_seen[index]; }

/* Slices do not answer these, nor do cards in MIG mode answer the first two. */
static int refused_under_mig(const char *name, device_t device) {
    static const char *calls[] = {
        "utilization", "process_utilization", "clock", "throttle", "throttle_old", "fan", "encoder", "decoder",
        "ecc", "fields", "limit", "threshold", "events", "gpm_sample", "mig_mode", NULL,
    };
    int most = device->slice != WHOLE ? 99 : slice_count(device->index) >= 0 ? 2 : 0;
    for (int i = 0; i < most && calls[i]; i++)
        if (!strcmp(calls[i], name)) return 1;
    return 0;
}

static int trouble(const char *name, device_t device) {
    const char *slow_ms, *code;
    if (!users) return UNINITIALIZED;
    if (!device) return BAD_ARGUMENT;
    count_call(name, device->index);
    if ((slow_ms = listed("FAKE_NVML_SLOW", name, device))) {
        took_s += atof(slow_ms) / 1000;
        if (!getenv("FAKE_NVML_NOW_S")) usleep((useconds_t)(1000 * atof(slow_ms)));
    }
    if (is_lost(device->index)) return LOST;
    if ((code = listed("FAKE_NVML_ANSWERING", name, device))) return atoi(code);
    if (refused_under_mig(name, device) || listed("FAKE_NVML_UNSUPPORTED", name, device)) return NOT_SUPPORTED;
    if (listed("FAKE_NVML_FORBIDDEN", name, device)) return NO_PERMISSION;
    if (listed("FAKE_NVML_ABSENT", name, device)) return NO_FUNCTION;
    if (listed("FAKE_NVML_FAILING", name, device)) return UNKNOWN;
    return OK;
}

/* Either the number or, where the environment says so, NVML's "no value" (cut to the width of the field). */
static uint64_t number(const char *name, device_t device, uint64_t value) {
    return listed("FAKE_NVML_BLANK", name, device) ? UINT64_MAX : value;
}

#define STOP_ON_TROUBLE(name, device) \
    do { int code_ = trouble(name, device); if (code_) return code_; } while (0)

#define ANSWER(function, type, name, value) \
    int function(device_t device, type *answer) { \
        STOP_ON_TROUBLE(name, device); \
        *answer = (type)number(name, device, value); \
        return OK; \
    }

/* ---- the library and its devices ------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags) {
    const char *error = getenv("FAKE_NVML_INIT_ERROR");
    (void)flags;
    if (error) return atoi(error);
    if (!getenv("FAKE_NVML_DEVICES")) return NO_DRIVER;
    if (users++) return OK;
    memset(counters, 0, sizeof counters);
    memset(last_seen, 0, sizeof last_seen);
    xids_told[0] = 0;
    live_samples = live_sets = 0;
    for (unsigned i = 0; i < MOST_DEVICES; i++) {
        cards[i] = (struct device){i, WHOLE};
        for (int s = 0; s < MOST_SLICES; s++) slices[i][s] = (struct device){i, s};
    }
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
    *device = &cards[index];
    return OK;
}

int nvmlDeviceGetUUID(device_t device, char *text, unsigned size) {
    STOP_ON_TROUBLE("uuid", device);
    if (device->slice == WHOLE) snprintf(text, size, "GPU-fa4e0000-0000-4000-8000-%012u", device->index);
    else snprintf(text, size, "MIG-fa4e0000-0000-4000-800%d-%012u", device->slice, device->index);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    unsigned index;
    int slice = WHOLE, found;
    if (!users) return UNINITIALIZED;
    found = sscanf(uuid, "GPU-fa4e0000-0000-4000-8000-%12u", &index) == 1
        || sscanf(uuid, "MIG-fa4e0000-0000-4000-800%1d-%12u", &slice, &index) == 2;
    if (!found || index >= device_count() || slice >= slice_count(index) + (slice == WHOLE)) return NOT_FOUND;
    if (is_lost(index)) return LOST;
    *device = slice == WHOLE ? &cards[index] : &slices[index][slice];
    return OK;
}

int nvmlDeviceGetName(device_t device, char *text, unsigned size) {
    STOP_ON_TROUBLE("name", device);
    snprintf(text, size, device->slice == WHOLE ? "Stand-in GPU" : "Stand-in GPU MIG 1g.4gb");
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem_id; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(device_t device, struct pci *pci) {
    STOP_ON_TROUBLE("pci", device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 16 + device->index);
    return OK;
}

int nvmlDeviceGetTemperatureThreshold(device_t device, int kind, unsigned *celsius) {
    STOP_ON_TROUBLE("threshold", device);
    *celsius = (unsigned)number("threshold", device, kind == 1 ? 87 : 92); /* 1: slowdown */
    return OK;
}

/* ---- MIG ------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    STOP_ON_TROUBLE("mig_mode", device);
    *current = *pending = slice_count(device->index) >= 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) { (void)device; *count = 7; return OK; }

/* Every second place is empty, as after slices were destroyed. */
int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned at, device_t *slice) {
    if (at % 2 || (int)at / 2 >= slice_count(device->index)) return NOT_FOUND;
    *slice = &slices[device->index][at / 2];
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t slice, device_t *device) {
    if (slice->slice == WHOLE) return BAD_ARGUMENT;
    *device = &cards[slice->index];
    return OK;
}

int nvmlDeviceGetGpuInstanceId(device_t device, unsigned *id) {
    *id = 7 + (unsigned)device->slice;
    return device->slice == WHOLE ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetComputeInstanceId(device_t device, unsigned *id) {
    *id = 0;
    return device->slice == WHOLE ? NOT_SUPPORTED : OK;
}

/* ---- one number each ------------------------------------------------------------------------------------------- */

struct rates { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(device_t device, struct rates *rates) {
    STOP_ON_TROUBLE("utilization", device);
    rates->gpu = (unsigned)number("utilization", device, 50 + device->index);
    rates->memory = (unsigned)number("utilization", device, 20 + device->index);
    return OK;
}

static uint64_t memory_total(device_t device) { return (device->slice == WHOLE ? 16 : 4) * GIB; }

static uint64_t memory_used(device_t device) {
    return device->slice == WHOLE ? (1 + device->index) * GIB : (1 + (unsigned)device->slice) * GIB / 4;
}

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory) {
    STOP_ON_TROUBLE("memory", device);
    memory->total = memory_total(device);
    memory->used = number("memory", device, memory_used(device) + GIB / 2);
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *memory) {
    STOP_ON_TROUBLE("memory_v2", device);
    memory->total = memory_total(device);
    memory->reserved = GIB / 2;
    memory->used = number("memory_v2", device, memory_used(device));
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

static unsigned power_mw(device_t device) { return 100000 + 10000 * device->index; }

ANSWER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "limit", 300000)
ANSWER(nvmlDeviceGetPowerUsage, unsigned, "power", power_mw(device))
ANSWER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "energy", power_mw(device) * now_s())
/* 4: held back by the software power cap */
ANSWER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 4)
ANSWER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle_old", 4)
ANSWER(nvmlDeviceGetFanSpeed, unsigned, "fan", 30 + device->index)

int nvmlDeviceGetEncoderUtilization(device_t device, unsigned *percent, unsigned *period_us) {
    STOP_ON_TROUBLE("encoder", device);
    *percent = (unsigned)number("encoder", device, 5);
    *period_us = 167000;
    return OK;
}

int nvmlDeviceGetDecoderUtilization(device_t device, unsigned *percent, unsigned *period_us) {
    STOP_ON_TROUBLE("decoder", device);
    *percent = (unsigned)number("decoder", device, 7);
    *period_us = 167000;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(device_t device, int corrected_or_not, int counter, unsigned long long *count) {
    STOP_ON_TROUBLE("ecc", device);
    if (corrected_or_not != 1 || counter != 0) return BAD_ARGUMENT; /* uncorrected, since the driver was loaded */
    *count = number("ecc", device, (uint64_t)number_or("FAKE_NVML_ECC", 0));
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
    double capability = number_or("FAKE_NVML_CAPABILITY", 9.0);
    STOP_ON_TROUBLE("capability", device);
    *major = (int)capability;
    *minor = (int)(10 * capability) % 10;
    return OK;
}

int nvmlDeviceGetComputeMode(device_t device, int *mode) {
    STOP_ON_TROUBLE("compute_mode", device);
    *mode = (int)number_or("FAKE_NVML_COMPUTE_MODE", 0);
    return OK;
}

/* ---- field values ---------------------------------------------------------------------------------------------- */

struct field { uint32_t id, scope; int64_t at_us, latency_us; unsigned type; int code; unsigned long long value; };

static void fill_field(device_t device, struct field *field) {
    double bytes_per_s = (field->id == 197 ? 1e6 : 2e6) + 1e6 * device->index; /* 197: out, 198: in */
    field->at_us = (int64_t)(1e6 * now_s());
    field->type = 3; /* unsigned long long */
    field->code = trouble("pcie", device);
    if ((field->id != 197 && field->id != 198) || field->id > number_or("FAKE_NVML_MOST_FIELDS", 1000))
        field->code = BAD_ARGUMENT;
    field->value = number("pcie", device, (uint64_t)(bytes_per_s * now_s()));
    if (field->id == 197) field->value = (uint64_t)number_or("FAKE_NVML_SENT_BYTES", (double)field->value);
}

int nvmlDeviceGetFieldValues(device_t device, int count, struct field *fields) {
    STOP_ON_TROUBLE("fields", device);
    for (int i = 0; i < count; i++) fill_field(device, &fields[i]);
    return OK;
}

/* ---- processes ------------------------------------------------------------------------------------------------- */

struct process { unsigned pid; char memory_mib[16], sm[32], kinds[8]; };

/* Fill in the processes of one device that are of this kind; return how many there are. */
static unsigned processes_of(device_t device, char kind, struct process *found) {
    char list[1024], where[16];
    unsigned count = 0;
    snprintf(list, sizeof list, "%s", getenv("FAKE_NVML_PROCESSES") ? getenv("FAKE_NVML_PROCESSES") : "");
    if (list[0] == '/') {
        FILE *file = fopen(list, "r");
        if (!file) return 0;
        if (!fgets(list, sizeof list, file)) list[0] = 0;
        fclose(file);
    }
    for (char *rest = list, *item; (item = strsep(&rest, ",")) && count < MOST_PROCESSES;) {
        struct process *one = &found[count];
        strcpy(one->kinds, "c");
        if (sscanf(item, "%15[^:]:%u:%15[^:]:%31[^:]:%7s", where, &one->pid, one->memory_mib, one->sm, one->kinds) < 4)
            continue;
        count += !strcmp(where, place(device)) && (kind == '*' || strchr(one->kinds, kind));
    }
    return count;
}

struct process_info { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };

static int list_processes(const char *name, char kind, device_t device, unsigned *size, struct process_info *infos) {
    struct process found[MOST_PROCESSES];
    unsigned room = *size;
    STOP_ON_TROUBLE(name, device);
    *size = processes_of(device, kind, found);
    if (*size > room) return TOO_SMALL;
    for (unsigned i = 0; i < *size; i++) {
        const char *mib = found[i].memory_mib;
        infos[i] = (struct process_info){found[i].pid, UINT64_MAX, ANY_INSTANCE, ANY_INSTANCE};
        if (strcmp(mib, "-")) infos[i].memory = (unsigned long long)atoi(mib) << 20;
    }
    return OK;
}

#define LIST_PROCESSES(function, name, kind) \
    int function(device_t device, unsigned *size, struct process_info *infos) { \
        return list_processes(name, kind, device, size, infos); \
    }

LIST_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "processes", 'c')
LIST_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "processes_v2", 'c')
LIST_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", 'g')
LIST_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics_v2", 'g')
LIST_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", 'm')
LIST_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps_v2", 'm')

struct process_sample { unsigned pid; unsigned long long at_us; unsigned sm, memory, encoder, decoder; };

int nvmlDeviceGetProcessUtilization(
    device_t device, struct process_sample *samples, unsigned *size, unsigned long long since_us
) {
    struct process found[MOST_PROCESSES];
    struct process_sample all[2 * MOST_PROCESSES];
    unsigned count, sum = 0, room = *size;
    STOP_ON_TROUBLE("process_utilization", device);
    last_seen[device->index] = since_us;
    count = processes_of(device, '*', found);
    for (unsigned i = 0; i < count; i++) {
        unsigned sm[2], given = (unsigned)sscanf(found[i].sm, "%u+%u", &sm[0], &sm[1]);
        for (unsigned k = 0; given <= 2 && k < given; k++) {
            unsigned long long at_us = (unsigned long long)(1e6 * (now_s() - (given - 1 - k)));
            if (at_us > since_us) all[sum++] = (struct process_sample){found[i].pid, at_us, sm[k], 0, 0, 0};
        }
    }
    *size = sum;
    if (!sum) return NOT_FOUND;
    if (sum > room) return TOO_SMALL;
    memcpy(samples, all, sum * sizeof *samples);
    return OK;
}

/* ---- GPM ------------------------------------------------------------------------------------------------------- */

struct gpm_support { unsigned version, supported; };
struct gpm_sample { device_t device; double at_s, worked_s; };
struct gpm_metric { unsigned id; int code; double value; const char *names[3]; };
struct gpm_metrics { unsigned version, count; struct gpm_sample *from, *to; struct gpm_metric metrics[]; };

int nvmlGpmQueryDeviceSupport(device_t device, struct gpm_support *support) {
    int code = trouble("gpm", device);
    support->supported = code == OK;
    return code == NOT_SUPPORTED ? OK : code; /* as the driver does: no error, but a No */
}

int nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    *sample = calloc(1, sizeof **sample);
    live_samples++;
    return OK;
}

int nvmlGpmSampleFree(struct gpm_sample *sample) { free(sample); live_samples--; return OK; }

int nvmlGpmSampleGet(device_t device, struct gpm_sample *sample) {
    STOP_ON_TROUBLE("gpm_sample", device);
    *sample = (struct gpm_sample){device, now_s(), worked_s(device->index)};
    return OK;
}

int nvmlGpmMigSampleGet(device_t device, unsigned gpu_instance, struct gpm_sample *sample) {
    if (device->slice != WHOLE || (int)gpu_instance - 7 >= slice_count(device->index)) return BAD_ARGUMENT;
    return nvmlGpmSampleGet(device, sample);
}

static double gpm_value(unsigned id, double share) {
    switch (id) {
    case 1: return 100 * share;  /* graphics */
    case 2: return 90 * share;   /* SM */
    case 3: return 50 * share;   /* occupancy */
    case 5: return 25 * share;   /* any tensor */
    case 10: return 20 * share;  /* DRAM */
    case 20: return 100 * share; /* PCIe out, MiB/s */
    case 21: return 200 * share; /* PCIe in, MiB/s */
    default: return NAN;
    }
}

int nvmlGpmMetricsGet(struct gpm_metrics *get) {
    double window_s;
    if (get->version != 1 || !get->from->device || get->from->device != get->to->device) return BAD_ARGUMENT;
    STOP_ON_TROUBLE("gpm_metrics", get->to->device);
    window_s = get->to->at_s - get->from->at_s;
    for (unsigned i = 0; i < get->count; i++) {
        struct gpm_metric *metric = &get->metrics[i];
        metric->code = window_s <= 0 ? NO_DATA : metric->id == 3 ? trouble("gpm_occupancy", get->to->device) : OK;
        metric->value = gpm_value(metric->id, (get->to->worked_s - get->from->worked_s) / window_s);
        if (listed("FAKE_NVML_BLANK", "gpm_metrics", get->to->device)) metric->value = NAN;
    }
    return OK;
}

/* ---- events ---------------------------------------------------------------------------------------------------- */

struct event_set { char listens[MOST_DEVICES]; };
struct event { device_t device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };

int nvmlEventSetCreate(struct event_set **set) { *set = calloc(1, sizeof **set); live_sets++; return OK; }

int nvmlEventSetFree(struct event_set *set) { free(set); live_sets--; return OK; }

ANSWER(nvmlDeviceGetSupportedEventTypes, unsigned long long, "events", 0x1F)

int nvmlDeviceRegisterEvents(device_t device, unsigned long long types, struct event_set *set) {
    STOP_ON_TROUBLE("events", device);
    if (types & XID_EVENT) set->listens[device->index] = 1;
    return OK;
}

/* Take the next Xid of the list that this set listens to; a list that was changed begins anew. */
static int next_xid(struct event_set *set, struct event *event) {
    const char *text = getenv("FAKE_NVML_XID");
    char list[256];
    unsigned at = 0, index, xid;
    int slice;
    snprintf(list, sizeof list, "%s", text ? text : "");
    if (strcmp(list, xids_told)) { strcpy(xids_told, list); xids_taken = 0; }
    for (char *rest = list, *item; (item = strsep(&rest, ","));) {
        slice = WHOLE;
        if (sscanf(item, "%u:%u", &index, &xid) != 2 && sscanf(item, "%u.%d:%u", &index, &slice, &xid) != 3) continue;
        if (at++ < xids_taken || index >= MOST_DEVICES || !set->listens[index]) continue;
        xids_taken = at;
        *event = (struct event){&cards[index], XID_EVENT, xid, ANY_INSTANCE, ANY_INSTANCE};
        if (slice != WHOLE) event->gpu_instance = 7 + (unsigned)slice;
        return 1;
    }
    return 0;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms) {
    STOP_ON_TROUBLE("wait", &cards[0]);
    if (next_xid(set, event)) return OK;
    if (timeout_ms) usleep(1000 * timeout_ms);
    return TIMEOUT;
}
