/*
 * A SPANK plugin: adds --badc-telemetry[=interval] to sbatch, salloc and srun. For such a job, `badcjobs record` runs
 * once on each node, and writes badc-telemetry-<job>....sqlite to the working folder of the job.
 *
 * How: before a task starts, as the user and inside the cgroup of the job, the plugin forks a keeper process, which
 * starts `badcjobs record`, and stops it when Slurm's step daemon requests it or has died. They communicate through two
 * pipes created before the fork, so that the daemon, which is root, never reads a user's file or signals a process.
 *
 * It never fails a job: without badcjobs, without a GPU, on a full disk, the task runs as without the plugin. Only an
 * invalid interval is refused, by sbatch and srun, before the job is submitted.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

SPANK_PLUGIN(badc_telemetry, 1)

#define OPTION "badc-telemetry"
#define DEFAULT_INTERVAL "1"
#define PATIENCE_MS 8000 /* time for the recorder to publish its file; then it is killed */
#define GRACE_MS 500     /* time for the keeper after that; then the job ends without waiting */

static const int JOB_SIGNALS[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};

static int wanted;                           /* the option was given */
static char interval[32] = DEFAULT_INTERVAL; /* seconds, as given */
static char program[PATH_MAX] = "badcjobs";  /* badcjobs=/path in plugstack.conf; default: the PATH of the job */
static int stop[2] = {-1, -1};               /* pipe to the keepers; its end: stop the recorders */
static int ended[2] = {-1, -1};              /* pipe from the keepers; its end: all have ended */
static unsigned tasks_left;
static char lock_path[PATH_MAX];

/* --- the option -------------------------------------------------------------------------------------------------- */

static int is_interval(const char *text)
{
    char *end;
    double seconds;

    if (strlen(text) >= sizeof interval || !isdigit((unsigned char)text[0]))
        return 0;
    seconds = strtod(text, &end);
    return *end == '\0' && seconds >= 0.01 && seconds <= 86400;
}

static int on_option(int val, const char *argument, int remote)
{
    (void)val;
    if (argument != NULL && argument[0] != '\0') {
        if (!is_interval(argument)) {
            if (!remote)
                slurm_error("--" OPTION "=%s: must be a number of seconds between samples, such as 1 or 0.5", argument);
            return remote ? 0 : -1;
        }
        snprintf(interval, sizeof interval, "%s", argument);
    }
    wanted = 1;
    return 0;
}

static struct spank_option option = {
    OPTION, "[interval]", "record the job's GPUs with badcjobs, every interval seconds (default 1)", 2, 0, on_option,
};

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    for (int i = 0; i < count; i++)
        if (strncmp(arguments[i], "badcjobs=", 9) == 0 && strlen(arguments[i]) - 9 < sizeof program)
            strcpy(program, arguments[i] + 9);
    if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
        slurm_verbose(OPTION ": the option cannot be registered");
    return 0;
}

/* --- in the step daemon ------------------------------------------------------------------------------------------ */

int slurm_spank_user_init(spank_t spank, int count, char **arguments)
{
    uint32_t tasks = 0;

    (void)count, (void)arguments;
    if (!wanted || !spank_remote(spank))
        return 0;
    spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &tasks);
    tasks_left = tasks ? tasks : 1;
    if (pipe2(stop, O_CLOEXEC) != 0 || pipe2(ended, O_CLOEXEC) != 0)
        wanted = 0;
    return 0;
}

static void wait_for_keepers(void)
{
    struct pollfd all_ended = {.fd = ended[0], .events = POLLIN};

    if (ended[0] < 0)
        return;
    close(stop[1]);
    close(ended[1]); /* our end; poll returns when the keepers have closed theirs */
    poll(&all_ended, 1, PATIENCE_MS + GRACE_MS);
    close(stop[0]);
    close(ended[0]);
    stop[0] = stop[1] = ended[0] = ended[1] = -1;
}

int slurm_spank_task_exit(spank_t spank, int count, char **arguments)
{
    (void)spank, (void)count, (void)arguments;
    if (wanted && tasks_left > 0 && --tasks_left == 0)
        wait_for_keepers();
    return 0;
}

int slurm_spank_exit(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    if (wanted && spank_remote(spank))
        wait_for_keepers(); /* a step whose tasks could not start */
    return 0;
}

/* --- in the task, as the user ------------------------------------------------------------------------------------ */

static const char *job_variable(char **environment, const char *name)
{
    size_t length = strlen(name);

    for (; environment != NULL && *environment != NULL; environment++)
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=')
            return *environment + length + 1;
    return "";
}

/* Open a lock file in the user's private folder on this node; -1: it does not exist or cannot be trusted. */
static int open_lock(const char *name, int how, char *path, size_t size)
{
    struct stat found;

    snprintf(path, size, "/tmp/badcjobs-slurm-%u", (unsigned)geteuid());
    if (how & O_CREAT)
        mkdir(path, 0700);
    if (lstat(path, &found) != 0 || !S_ISDIR(found.st_mode) || found.st_uid != geteuid())
        return -1;
    snprintf(path + strlen(path), size - strlen(path), "/%s.lock", name);
    return open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | how, 0600);
}

static int is_taken(const char *name)
{
    char path[PATH_MAX];
    int fd = open_lock(name, 0, path, sizeof path);
    int taken = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0;

    if (fd >= 0)
        close(fd);
    return taken;
}

/* Take a lock, so that only one recorder runs for the same GPUs; -1: another process has it. */
static int take_lock(const char *name)
{
    int fd = open_lock(name, O_CREAT, lock_path, sizeof lock_path);

    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void replace_odd(char *text)
{
    for (; *text != '\0'; text++)
        if (!isalnum((unsigned char)*text) && strchr("._-,", *text) == NULL)
            *text = '_';
}

struct names {
    char whole_node[128]; /* lock of a recorder for all GPUs of the job on this node */
    char own[400];        /* lock of a recorder for the GPUs of one task */
    char file[400];       /* file name without its suffix */
};

static void name_all(struct names *names, spank_t spank, char **environment, int in_batch)
{
    const char *array = job_variable(environment, "SLURM_ARRAY_JOB_ID");
    const char *job = array[0] ? array : job_variable(environment, "SLURM_JOB_ID");
    const char *index = job_variable(environment, "SLURM_ARRAY_TASK_ID");
    const char *node = job_variable(environment, "SLURMD_NODENAME");
    const char *restart = job_variable(environment, "SLURM_RESTART_COUNT");
    char step[64] = "";
    uint32_t number = 0, task = 0;

    if (!in_batch) {
        spank_get_item(spank, S_JOB_STEPID, &number);
        spank_get_item(spank, S_TASK_GLOBAL_ID, &task);
        snprintf(step, sizeof step, ".s%u.p%u", number, task);
    }
    snprintf(names->whole_node, sizeof names->whole_node, "record-%.20s-%.60s",
             job_variable(environment, "SLURM_JOB_ID"), node);
    snprintf(names->own, sizeof names->own, "%s-%.200s", names->whole_node,
             job_variable(environment, "CUDA_VISIBLE_DEVICES"));
    snprintf(names->file, sizeof names->file, OPTION "-%.20s%s%.20s.r%.10s.%.60s%s", job, index[0] ? "_" : "", index,
             restart[0] ? restart : "0", node, step);
    replace_odd(names->whole_node);
    replace_odd(names->own);
    replace_odd(names->file);
}

/* Execute `badcjobs record`; its messages go to a log file beside the database. */
static void become_recorder(const char *file, char **environment)
{
    char database[512], log[512];
    char *arguments[] = {program, "record", "--out", database, "--interval", interval, NULL};
    int log_fd;

    snprintf(database, sizeof database, "%s.sqlite", file);
    snprintf(log, sizeof log, "%s.log", file);
    log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (log_fd >= 0)
        dup2(log_fd, 2);
    for (size_t i = 0; i < sizeof JOB_SIGNALS / sizeof *JOB_SIGNALS; i++)
        signal(JOB_SIGNALS[i], SIG_DFL); /* ignored signals stay ignored after exec */
    environ = environment; /* not execvpe: it would search the PATH of the daemon */
    execvp(program, arguments);
    dprintf(2, "badc-telemetry: %s cannot be started: %s\n  try: put badcjobs on the PATH of the job\n", program,
            strerror(errno));
    _exit(127);
}

/* srun waits until all processes have closed the output of a task. */
static void close_output(void)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    for (int fd = 0; null >= 0 && fd < 3; fd++)
        dup2(null, fd);
}

/* Leave either a database or a log with the reason why there is none. */
static void finish_log(const char *file, time_t started, int stopped)
{
    char database[512], log[512];
    struct stat found;
    int log_fd;

    snprintf(database, sizeof database, "%s.sqlite", file);
    snprintf(log, sizeof log, "%s.log", file);
    if (stopped && lstat(database, &found) != 0 && errno == ENOENT) {
        log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644);
        dprintf(log_fd, "badc-telemetry: nothing was recorded: the job ended after %ld s, before the recorder was ready\n",
                (long)(time(NULL) - started));
    } else if (lstat(log, &found) == 0 && S_ISREG(found.st_mode) && found.st_size == 0) {
        unlink(log);
    }
}

static void end_recorder(pid_t recorder)
{
    const struct timespec moment = {.tv_nsec = 50 * 1000 * 1000};

    kill(recorder, SIGTERM);
    for (int waited_ms = 0; waited_ms < PATIENCE_MS; waited_ms += 50) {
        if (waitpid(recorder, NULL, WNOHANG) != 0)
            return;
        nanosleep(&moment, NULL);
    }
    kill(recorder, SIGKILL);
    waitpid(recorder, NULL, 0);
}

/* Start the recorder, and stop it when the daemon closes its pipe or has died; it may end earlier. */
static void keep_recorder(const char *file, char **environment)
{
    struct pollfd end_it = {.fd = stop[0], .events = POLLIN};
    time_t started = time(NULL);
    int stopped = 0;
    pid_t recorder;

    close(stop[1]); /* otherwise poll would never see the end of the pipe */
    close(ended[0]);
    close_output();
    recorder = fork();
    if (recorder == 0)
        become_recorder(file, environment);
    while (recorder > 0 && waitpid(recorder, NULL, WNOHANG) == 0)
        if (poll(&end_it, 1, 500) > 0) {
            stopped = 1;
            end_recorder(recorder);
            break;
        }
    finish_log(file, started, stopped);
    unlink(lock_path);
    _exit(0);
}

/* Fork twice: the task must not inherit a child process that it did not start. */
static void start_keeper(const char *file, char **environment)
{
    pid_t between = fork();

    if (between == 0) {
        if (fork() != 0)
            _exit(0);
        setsid();
        for (size_t i = 0; i < sizeof JOB_SIGNALS / sizeof *JOB_SIGNALS; i++)
            signal(JOB_SIGNALS[i], SIG_IGN); /* they are for the job; only the daemon stops the keeper */
        keep_recorder(file, environment);
    }
    if (between > 0)
        waitpid(between, NULL, 0);
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    char **environment = NULL;
    uint32_t step = 0;
    struct names names;
    int lock, in_batch;

    (void)count, (void)arguments;
    if (!wanted || stop[0] < 0 || spank_get_item(spank, S_JOB_ENV, &environment) != ESPANK_SUCCESS)
        return 0;
    spank_get_item(spank, S_JOB_STEPID, &step);
    in_batch = step == SLURM_BATCH_SCRIPT;
    name_all(&names, spank, environment, in_batch);
    if (!in_batch && is_taken(names.whole_node))
        return 0; /* the recorder of the batch script records all GPUs of the job on this node */
    lock = take_lock(in_batch ? names.whole_node : names.own);
    if (lock >= 0) {
        start_keeper(names.file, environment);
        close(lock); /* the keeper holds it until it ends */
    }
    return 0;
}
