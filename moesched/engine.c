/* `Engine.submit`, `Engine.issued` and `Engine.finish` of engine.py for plain tasks, which are nearly all: the same steps,
written out, and those of edges.py, stream_edges.py and `Lane.next_task` with them.

The classes stay those of tasks.py and engine.py. Their instances keep fields in slots, whose offsets are looked up once,
as the interpreter does for its own specialised instructions. Whatever is not plain (edges by hand, keywords, a run that
halts) goes to the methods in Python, and so does what a plain task may lead to (joins, cancelled tasks, collectives).
*/
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "the fields are read without locks: free-threaded Python runs engine.py"
#endif

enum { VERSION = 3 }; /* Of the steps below; engine.py names the one that it describes. */
enum { WAITING, READY, RUNNING, ISSUED, DONE };
enum { CLASS_SHIFT = 48, MOST_ARGUMENTS = 16 };

static struct {
    Py_ssize_t id, key, lane, state, waits, deps, inputs, followers, operands, waiter, value, cause, edges;
} of_task;
static struct {
    Py_ssize_t writer, readers;
} of_block;
static struct {
    Py_ssize_t domain, heap, in_order, queue, running, simple, depth, depth_in_order, in_flight, unstarted;
} of_lane;
static struct {
    Py_ssize_t before, followers;
} of_edges;
static struct {
    Py_ssize_t submitted, settled, started, awaited, failure;
} of_engine;

static PyTypeObject *Task, *Block, *Lane, *Edges;
static PyObject *submit_in_python, *issued_in_python, *finish_in_python, *read_only, *cancelled_by, *heappush, *heappop;
static PyObject *states[DONE + 1];
static PyObject *s_append, *s_popleft, *s_unblock, *s_release, *s_settle_all, *s_next;

/* -- fields ------------------------------------------------------------------------------------------ */

#define FIELD(object, offset) (*(PyObject **)((char *)(object) + (offset)))

/* A borrowed field; NULL with an AttributeError where it was never set. */
static PyObject *get(PyObject *object, Py_ssize_t offset) {
    PyObject *value = FIELD(object, offset);
    if (!value) PyErr_Format(PyExc_AttributeError, "a field of %R is not set", (PyObject *)Py_TYPE(object));
    return value;
}

/* Set a field to a new reference, which is taken. */
static void put(PyObject *object, Py_ssize_t offset, PyObject *value) {
    PyObject *old = FIELD(object, offset);
    FIELD(object, offset) = value;
    Py_XDECREF(old);
}

static void set(PyObject *object, Py_ssize_t offset, PyObject *value) { put(object, offset, Py_NewRef(value)); }

/* Whether an object is of a type; otherwise a TypeError is set. */
static int is_a(PyTypeObject *type, PyObject *object) {
    const int fits = PyObject_TypeCheck(object, type);
    if (!fits) PyErr_Format(PyExc_TypeError, "%R is no %s", object, type->tp_name);
    return fits;
}

/* A borrowed field of a type; NULL with an error set where it is none. */
static PyObject *get_a(PyTypeObject *type, PyObject *object, Py_ssize_t offset) {
    PyObject *value = get(object, offset);
    return value && is_a(type, value) ? value : NULL;
}

static long long get_integer(PyObject *object, Py_ssize_t offset) {
    PyObject *value = get(object, offset);
    return value ? PyLong_AsLongLong(value) : -1;
}

/* Set a field to an integer; returns -1 with an error set where there is no memory. */
static int set_integer(PyObject *object, Py_ssize_t offset, long long number) {
    PyObject *value = PyLong_FromLongLong(number);
    if (!value) return -1;
    put(object, offset, value);
    return 0;
}

static int is_true(PyObject *object, Py_ssize_t offset) { return FIELD(object, offset) == Py_True; }

static int is_none(PyObject *object, Py_ssize_t offset) { return FIELD(object, offset) == Py_None; }

/* Drop the result of a call; returns -1 with an error set where it raised. */
static int drop(PyObject *result) {
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int call(PyObject *object, PyObject *name, PyObject *argument) {
    return drop(PyObject_CallMethodOneArg(object, name, argument));
}

/* Call the method in Python with the same arguments. */
static PyObject *in_python(PyObject *method, PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PyObject *all[MOST_ARGUMENTS];
    const Py_ssize_t total = count + (names ? PyTuple_GET_SIZE(names) : 0);
    if (total >= MOST_ARGUMENTS) return PyErr_Format(PyExc_TypeError, "%zd arguments are too many", total);
    all[0] = self;
    for (Py_ssize_t i = 0; i < total; i++) all[i + 1] = arguments[i];
    return PyObject_Vectorcall(method, all, count + 1, names);
}

/* -- ready tasks ------------------------------------------------------------------------------------- */

static int start(PyObject *engine, PyObject *lane, PyObject *task) {
    set(lane, of_lane.running, task);
    set(task, of_task.state, states[RUNNING]);
    PyObject *started = get_a(&PyList_Type, engine, of_engine.started);
    return started ? PyList_Append(started, task) : -1;
}

static int push(PyObject *heap, PyObject *task) {
    PyObject *key = get(task, of_task.key), *item = key ? PyTuple_Pack(2, key, task) : NULL;
    PyObject *both[] = {heap, item};
    const int failed = !item || drop(PyObject_Vectorcall(heappush, both, 2, NULL));
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

/* Whether nothing but its edges and its lane decides when a task starts. */
static int is_plain(PyObject *task, PyObject *lane) {
    return is_none(task, of_task.cause) && is_true(lane, of_lane.simple);
}

static int is_stream(PyObject *lane) { return !is_none(lane, of_lane.domain); }

/* The state of the first task of a deque; WAITING where there is none. */
static long long first_state(PyObject *queue, PyObject **first) {
    *first = PySequence_Size(queue) > 0 ? PySequence_GetItem(queue, 0) : NULL;
    return *first && PyObject_TypeCheck(*first, Task) ? get_integer(*first, of_task.state) : WAITING;
}

/* Whether a stream takes a task now; returns -1 with an error set. See `Lane.next_task`. */
static int may_take(PyObject *lane) {
    PyObject *unstarted = get(lane, of_lane.unstarted), *first = NULL;
    if (!unstarted) return -1;
    while (first_state(unstarted, &first) >= RUNNING) {
        Py_DECREF(first);
        if (drop(PyObject_CallMethodNoArgs(unstarted, s_popleft))) return -1;
    }
    const PyObject *earliest = first; /* Compared only: the lane's deque keeps it. */
    Py_XDECREF(first);
    const long long in_flight = get_integer(lane, of_lane.in_flight);
    const int few = in_flight < get_integer(lane, of_lane.depth);
    const int may_run_ahead = in_flight < get_integer(lane, of_lane.depth_in_order);
    if (PyErr_Occurred()) return -1;
    if (few || !may_run_ahead || is_true(lane, of_lane.in_order)) return may_run_ahead;
    PyObject *heap = get_a(&PyList_Type, lane, of_lane.heap);
    if (!heap) return -1;
    if (!PyList_GET_SIZE(heap)) return 0;
    PyObject *item = PyList_GET_ITEM(heap, 0);
    return PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2 && PyTuple_GET_ITEM(item, 1) == earliest;
}

/* Take the next task out of an in-order lane's queue: a new reference; NULL where none may start. */
static PyObject *next_in_order(PyObject *engine, PyObject *lane, PyObject *queue) {
    PyObject *first;
    const long long state = first_state(queue, &first);
    Py_XDECREF(first);
    if (PyErr_Occurred()) return NULL;
    if (state == READY) return PyObject_CallMethodNoArgs(queue, s_popleft);
    set(lane, of_lane.running, Py_None);
    if (state >= DONE) call(engine, s_next, lane);
    return NULL;
}

/* Take the next task out of a ready-first lane's heap: a new reference; NULL where there is none. */
static PyObject *next_by_key(PyObject *lane, PyObject *heap) {
    if (!PyList_GET_SIZE(heap)) {
        set(lane, of_lane.running, Py_None);
        return NULL;
    }
    PyObject *item = PyObject_CallOneArg(heappop, heap);
    PyObject *task = item ? PySequence_GetItem(item, 1) : NULL;
    Py_XDECREF(item);
    return task;
}

/* Start the next task of a lane that is free, or whose task has left it. */
static int start_next(PyObject *engine, PyObject *lane) {
    if (is_stream(lane)) {
        const int may = may_take(lane);
        if (may <= 0) {
            set(lane, of_lane.running, Py_None);
            return may;
        }
    }
    const int in_order = is_true(lane, of_lane.in_order);
    PyObject *waiting = in_order ? get(lane, of_lane.queue) : get_a(&PyList_Type, lane, of_lane.heap);
    if (!waiting) return -1;
    PyObject *task = in_order ? next_in_order(engine, lane, waiting) : next_by_key(lane, waiting);
    if (!task) return PyErr_Occurred() ? -1 : 0;
    const int failed = !is_a(Task, task) || start(engine, lane, task);
    Py_DECREF(task);
    return failed;
}

/* Queue a plain task whose edges are met, or start it where its lane is free. */
static int release(PyObject *engine, PyObject *lane, PyObject *task) {
    const int in_order = is_true(lane, of_lane.in_order);
    PyObject *waiting = in_order ? get(lane, of_lane.queue) : get_a(&PyList_Type, lane, of_lane.heap);
    if (!waiting) return -1;
    if (is_stream(lane)) {
        set(task, of_task.state, states[READY]);
        if (!in_order && push(waiting, task)) return -1;
        return is_none(lane, of_lane.running) ? start_next(engine, lane) : 0;
    }
    if (is_none(lane, of_lane.running)) {
        PyObject *first = in_order ? PySequence_GetItem(waiting, 0) : NULL;
        if (in_order && !first) return -1;
        Py_XDECREF(first);
        if (in_order && first == task) {
            const int failed = drop(PyObject_CallMethodNoArgs(waiting, s_popleft));
            return failed ? -1 : start(engine, lane, task);
        }
        if (!in_order && !PyList_GET_SIZE(waiting)) return start(engine, lane, task);
    }
    set(task, of_task.state, states[READY]);
    return in_order ? 0 : push(waiting, task);
}

/* -- submit ------------------------------------------------------------------------------------------ */

/* A task's edges on its device, borrowed; NULL with an error set. */
static PyObject *edges_of(PyObject *task) {
    if (is_none(task, of_task.edges)) {
        PyObject *none_yet = PyObject_CallNoArgs((PyObject *)Edges);
        if (!none_yet) return NULL;
        put(task, of_task.edges, none_yet);
    }
    return get_a(Edges, task, of_task.edges);
}

/* Have a task wait for another on their device. */
static int wait_there(PyObject *task, PyObject *other) {
    PyObject *edges = edges_of(task), *before = edges ? get_a(&PyList_Type, edges, of_edges.before) : NULL;
    if (!before) return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); i++)
        if (PyList_GET_ITEM(before, i) == other) return 0;
    return PyList_Append(before, other);
}

/* Whether two tasks are of streams of one device; returns -1 with an error set. */
static int on_one_device(PyObject *task, PyObject *other) {
    PyObject *lane = get_a(Lane, task, of_task.lane), *other_lane = get_a(Lane, other, of_task.lane);
    if (!lane || !other_lane) return -1;
    return PyObject_RichCompareBool(FIELD(lane, of_lane.domain), FIELD(other_lane, of_lane.domain), Py_EQ);
}

/* Whether the device enforces a new edge, which then is recorded; returns -1 with an error set. */
static int keep_on_device(PyObject *task, PyObject *other, int data) {
    if (get_integer(other, of_task.state) != ISSUED) return PyErr_Occurred() ? -1 : 0;
    const int same = on_one_device(task, other);
    if (same <= 0) return same;
    if (wait_there(task, other)) return -1;
    if (!data) return 1;
    PyObject *edges = edges_of(other), *followers = edges ? get_a(&PyList_Type, edges, of_edges.followers) : NULL;
    return !followers || PyList_Append(followers, task) ? -1 : 1;
}

/* Have a task follow another; returns 1 where it has to wait for it, 0 where not, -1 with an error set. */
static int follow(PyObject *task, PyObject *deps, PyObject *other, int data) {
    PyObject *id = get(other, of_task.id), *followers = get(other, of_task.followers);
    if (!id || !followers || PyList_Append(deps, id)) return -1;
    if (followers != Py_None) {
        const int kept = is_stream(FIELD(task, of_task.lane)) ? keep_on_device(task, other, data) : 0;
        if (kept) return kept < 0 ? -1 : 0;
        return PyList_Append(followers, task) ? -1 : 1;
    }
    if (!data || !is_none(task, of_task.cause) || get_integer(other, of_task.state) == DONE) return 0;
    PyObject *cause = PyErr_Occurred() ? NULL : PyObject_CallOneArg(cancelled_by, other);
    if (!cause) return -1;
    put(task, of_task.cause, cause);
    return 0;
}

/* Enter a task that reads a block; returns the number of tasks that it has to wait for, or -1 with an error set. */
static Py_ssize_t enter_read(PyObject *task, PyObject *deps, PyObject *block) {
    PyObject *readers = get_a(&PyList_Type, block, of_block.readers);
    if (!readers || PyList_Append(readers, task)) return -1;
    if (is_none(block, of_block.writer)) return 0;
    PyObject *writer = get_a(Task, block, of_block.writer);
    return writer ? follow(task, deps, writer, 1) : -1;
}

/* The same for a task that overwrites a block. */
static Py_ssize_t enter_write(PyObject *task, PyObject *deps, PyObject *block) {
    PyObject *readers = get_a(&PyList_Type, block, of_block.readers);
    if (!readers) return -1;
    Py_ssize_t waits = 0;
    if (PyList_GET_SIZE(readers)) {
        PyObject *none_yet = PyList_New(0);
        if (!none_yet) return -1;
        FIELD(block, of_block.readers) = none_yet;
        for (Py_ssize_t i = 0; waits >= 0 && i < PyList_GET_SIZE(readers); i++) {
            PyObject *other = PyList_GET_ITEM(readers, i);
            if (other == task) continue;
            const int wait = is_a(Task, other) ? follow(task, deps, other, 0) : -1;
            waits = wait < 0 ? -1 : waits + wait;
        }
        Py_DECREF(readers);
    } else if (!is_none(block, of_block.writer)) {
        PyObject *writer = get_a(Task, block, of_block.writer);
        waits = !writer ? -1 : writer == task ? 0 : follow(task, deps, writer, 0);
    }
    set(block, of_block.writer, task);
    return waits;
}

typedef Py_ssize_t Enter(PyObject *task, PyObject *deps, PyObject *block);

/* The same for each block of a list or tuple. */
static inline Py_ssize_t enter_all(Enter *one, PyObject *task, PyObject *deps, PyObject *blocks) {
    Py_ssize_t waits = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(blocks); i++) {
        PyObject *block = PySequence_Fast_GET_ITEM(blocks, i);
        const Py_ssize_t wait = is_a(Block, block) ? one(task, deps, block) : -1;
        if (wait < 0) return -1;
        waits += wait;
    }
    return waits;
}

/* Number a task in program order. */
static int number(PyObject *engine, PyObject *task, PyObject *priority_class) {
    PyObject *id = Py_XNewRef(get(engine, of_engine.submitted));
    const long long count = id ? PyLong_AsLongLong(id) : -1;
    const long long class = priority_class ? PyLong_AsLongLong(priority_class) : 0;
    int failed = PyErr_Occurred() || set_integer(engine, of_engine.submitted, count + 1);
    if (!failed) {
        set(task, of_task.id, id);
        if (class) failed = set_integer(task, of_task.key, class * (1LL << CLASS_SHIFT) + count);
        else set(task, of_task.key, id);
    }
    Py_XDECREF(id);
    return failed ? -1 : 0;
}

/* Add the edges of a task's blocks, and leave it to wait for them. */
static int enter(PyObject *engine, PyObject *task, PyObject *lane, PyObject *reads, PyObject *writes) {
    PyObject *deps = get_a(&PyList_Type, task, of_task.deps);
    const Py_ssize_t for_reads = deps ? enter_all(enter_read, task, deps, reads) : -1;
    if (for_reads < 0 || set_integer(task, of_task.inputs, PyList_GET_SIZE(deps))) return -1;
    const Py_ssize_t for_writes = enter_all(enter_write, task, deps, writes);
    if (for_writes < 0 || set_integer(task, of_task.waits, for_reads + for_writes)) return -1;
    if (is_true(lane, of_lane.in_order)) {
        PyObject *queue = get(lane, of_lane.queue);
        if (!queue || call(queue, s_append, task)) return -1;
    }
    if (is_stream(lane)) {
        PyObject *unstarted = get(lane, of_lane.unstarted);
        if (!unstarted || call(unstarted, s_append, task)) return -1;
    }
    if (for_reads + for_writes) return 0;
    return is_plain(task, lane) ? release(engine, lane, task) : call(engine, s_unblock, task);
}

static PyObject *submit(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PyObject *task = count ? arguments[0] : NULL;
    const int plain = !names && count >= 1 && count <= 5 && PyObject_TypeCheck(task, Task)
        && is_none(self, of_engine.failure) && FIELD(task, of_task.lane)
        && PyObject_TypeCheck(FIELD(task, of_task.lane), Lane)
        && (count < 4 || (PyTuple_CheckExact(arguments[3]) && !PyTuple_GET_SIZE(arguments[3])));
    if (!plain) return in_python(submit_in_python, self, arguments, count, names);
    PyObject *none = PyTuple_New(0);
    PyObject *reads = PySequence_Fast(count > 1 ? arguments[1] : none, "a task reads a sequence of blocks");
    PyObject *writes = reads ? PySequence_Fast(count > 2 ? arguments[2] : none, "a task writes a sequence of blocks") : NULL;
    const int failed = !writes || number(self, task, count > 4 ? arguments[4] : NULL)
        || enter(self, task, FIELD(task, of_task.lane), reads, writes);
    Py_XDECREF(writes);
    Py_XDECREF(reads);
    Py_XDECREF(none);
    return failed ? NULL : Py_NewRef(task);
}

/* -- finish ------------------------------------------------------------------------------------------ */

/* Count one edge of a task as met; one that is not plain goes through the engine in Python, and to `ended` if it is over. */
static int meet(PyObject *engine, PyObject *task, PyObject **ended) {
    if (!is_a(Task, task)) return -1;
    const long long waits = get_integer(task, of_task.waits) - 1;
    if (PyErr_Occurred() || set_integer(task, of_task.waits, waits)) return -1;
    if (waits) return 0;
    PyObject *lane = get_a(Lane, task, of_task.lane);
    if (!lane) return -1;
    const int may_start = is_plain(task, lane) && get_integer(task, of_task.state) != ISSUED;
    if (PyErr_Occurred()) return -1;
    if (may_start) return release(engine, lane, task);
    if (!*ended && !(*ended = PyList_New(0))) return -1;
    return drop(PyObject_CallMethodObjArgs(engine, s_release, task, *ended, NULL));
}

/* Release the tasks that waited for one that is done. */
static int release_followers(PyObject *engine, PyObject *task) {
    PyObject *followers = Py_XNewRef(FIELD(task, of_task.followers)), *ended = NULL;
    set(task, of_task.followers, Py_None);
    int failed = 0;
    if (followers && PyList_Check(followers))
        for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(followers); i++)
            failed = meet(engine, PyList_GET_ITEM(followers, i), &ended);
    if (!failed && ended && PyList_GET_SIZE(ended)) failed = call(engine, s_settle_all, ended);
    Py_XDECREF(followers);
    Py_XDECREF(ended);
    return failed;
}

static int keep_value(PyObject *task, PyObject *value) {
    PyObject *kept = PyObject_CallOneArg(read_only, value);
    if (!kept) return -1;
    put(task, of_task.value, kept);
    return 0;
}

static int tell_waiter(PyObject *engine, PyObject *task) {
    PyObject *awaited = get_a(&PyList_Type, engine, of_engine.awaited);
    return awaited ? PyList_Append(awaited, task) : -1;
}

/* Have a task settle only after those before it on its device; returns 1 where one is unsettled, -1 with an error set. */
static int wait_on_host(PyObject *task) {
    if (is_none(task, of_task.edges)) return set_integer(task, of_task.waits, 0);
    PyObject *edges = edges_of(task), *before = edges ? get_a(&PyList_Type, edges, of_edges.before) : NULL;
    if (!before) return -1;
    long long unsettled = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); i++) {
        PyObject *other = PyList_GET_ITEM(before, i);
        if (!is_a(Task, other)) return -1;
        if (get_integer(other, of_task.state) >= DONE) continue;
        PyObject *followers = get_a(&PyList_Type, other, of_task.followers);
        if (!followers || PyList_Append(followers, task)) return -1;
        unsettled++;
    }
    return set_integer(task, of_task.waits, unsettled) ? -1 : unsettled > 0;
}

/* Settle a task that is done. */
static int settle(PyObject *engine, PyObject *task) {
    set(task, of_task.state, states[DONE]);
    const long long settled = get_integer(engine, of_engine.settled);
    if (PyErr_Occurred() || set_integer(engine, of_engine.settled, settled + 1)) return -1;
    set(task, of_task.operands, Py_None);
    if (!is_none(task, of_task.waiter) && tell_waiter(engine, task)) return -1;
    return release_followers(engine, task);
}

static int count_in_flight(PyObject *lane, int more) {
    const long long in_flight = get_integer(lane, of_lane.in_flight);
    return PyErr_Occurred() ? -1 : set_integer(lane, of_lane.in_flight, in_flight + more);
}

/* Free the place of a task that ended on its lane, and start the lane's next one; on a stream, that may run already. */
static int leave(PyObject *engine, PyObject *lane, PyObject *task) {
    if (FIELD(lane, of_lane.running) == task) return start_next(engine, lane);
    if (count_in_flight(lane, -1)) return -1;
    return is_none(lane, of_lane.running) ? start_next(engine, lane) : 0;
}

static PyObject *finish(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PyObject *task = count ? arguments[0] : NULL;
    const int plain = !names && count >= 1 && count <= 2 && PyObject_TypeCheck(task, Task)
        && FIELD(task, of_task.lane) && PyObject_TypeCheck(FIELD(task, of_task.lane), Lane)
        && is_none(task, of_task.cause);
    if (!plain) return in_python(finish_in_python, self, arguments, count, names);
    PyObject *lane = FIELD(task, of_task.lane);
    if (count == 2 && arguments[1] != Py_None && keep_value(task, arguments[1])) return NULL;
    const int waits = wait_on_host(task);
    if (waits < 0 || (!waits && settle(self, task)) || leave(self, lane, task)) return NULL;
    Py_RETURN_NONE;
}

/* -- issued ------------------------------------------------------------------------------------------ */

/* Move the waits of a task's followers on its device there: a new list of these; NULL with an error set. */
static PyObject *leave_to_device(PyObject *task, PyObject *followers) {
    PyObject *released = PyList_New(0), *kept = PyList_New(0), *edges;
    int failed = !released || !kept;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(followers); i++) {
        PyObject *other = PyList_GET_ITEM(followers, i);
        const int same = is_a(Task, other) ? on_one_device(task, other) : -1;
        failed = same < 0 || PyList_Append(same ? released : kept, other) || (same && wait_there(other, task));
    }
    if (!failed && PyList_GET_SIZE(released)) {
        edges = edges_of(task);
        PyObject *listed = edges ? PyList_GetSlice(released, 0, PyList_GET_SIZE(released)) : NULL;
        failed = !listed;
        if (listed) put(edges, of_edges.followers, listed);
    }
    if (!failed) set(task, of_task.followers, kept);
    Py_XDECREF(kept);
    if (failed) Py_CLEAR(released);
    return released;
}

/* Count one edge of a task as met, which may start it. */
static int meet_one(PyObject *engine, PyObject *task) {
    PyObject *ended = NULL;
    const int failed = meet(engine, task, &ended) || (ended && PyList_GET_SIZE(ended) && call(engine, s_settle_all, ended));
    Py_XDECREF(ended);
    return failed ? -1 : 0;
}

static PyObject *issued(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PyObject *task = count ? arguments[0] : NULL;
    const int plain = !names && count == 1 && PyObject_TypeCheck(task, Task) && FIELD(task, of_task.lane)
        && PyObject_TypeCheck(FIELD(task, of_task.lane), Lane) && PyList_Check(FIELD(task, of_task.followers));
    if (!plain) return in_python(issued_in_python, self, arguments, count, names);
    PyObject *lane = FIELD(task, of_task.lane), *followers = FIELD(task, of_task.followers);
    set(task, of_task.state, states[ISSUED]);
    if (PyList_GET_SIZE(followers)) {
        PyObject *released = leave_to_device(task, followers);
        int failed = !released;
        for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(released); i++)
            failed = meet_one(self, PyList_GET_ITEM(released, i));
        Py_XDECREF(released);
        if (failed) return NULL;
    }
    if (count_in_flight(lane, 1) || start_next(self, lane)) return NULL;
    Py_RETURN_NONE;
}

/* -- the module -------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    Py_ssize_t *offset;
} Slot;

static const Slot task_slots[] = {
    {"id", &of_task.id}, {"key", &of_task.key}, {"lane", &of_task.lane}, {"state", &of_task.state},
    {"waits", &of_task.waits}, {"deps", &of_task.deps}, {"inputs", &of_task.inputs},
    {"followers", &of_task.followers}, {"operands", &of_task.operands}, {"waiter", &of_task.waiter},
    {"_value", &of_task.value}, {"cause", &of_task.cause}, {"device_edges", &of_task.edges}, {NULL, NULL},
};
static const Slot block_slots[] = {{"writer", &of_block.writer}, {"readers", &of_block.readers}, {NULL, NULL}};
static const Slot lane_slots[] = {
    {"domain", &of_lane.domain}, {"heap", &of_lane.heap}, {"in_order", &of_lane.in_order}, {"queue", &of_lane.queue},
    {"running", &of_lane.running}, {"simple", &of_lane.simple}, {"depth", &of_lane.depth},
    {"depth_in_order", &of_lane.depth_in_order}, {"in_flight", &of_lane.in_flight}, {"unstarted", &of_lane.unstarted},
    {NULL, NULL},
};
static const Slot edges_slots[] = {{"before", &of_edges.before}, {"followers", &of_edges.followers}, {NULL, NULL}};
static const Slot engine_slots[] = {
    {"submitted", &of_engine.submitted}, {"settled", &of_engine.settled}, {"started", &of_engine.started},
    {"awaited", &of_engine.awaited}, {"failure", &of_engine.failure}, {NULL, NULL},
};

/* Look up where the instances of a class keep its slots. */
static int find_slots(PyTypeObject *type, const Slot *slots) {
    for (; slots->name; slots++) {
        PyObject *found = PyObject_GetAttrString((PyObject *)type, slots->name);
        const PyMemberDef *member =
            found && Py_IS_TYPE(found, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)found)->d_member : NULL;
        const int kept = member && member->type == T_OBJECT_EX && !(member->flags & READONLY);
        if (kept) *slots->offset = member->offset;
        Py_XDECREF(found);
        if (!kept) {
            PyErr_Format(PyExc_ImportError, "%s.%s is no slot", type->tp_name, slots->name);
            return -1;
        }
    }
    return 0;
}

static PyMethodDef submit_method = {"submit", (PyCFunction)(void (*)(void))submit, METH_FASTCALL | METH_KEYWORDS,
                                    PyDoc_STR("See `PlainEngine.submit`.")};
static PyMethodDef issued_method = {"issued", (PyCFunction)(void (*)(void))issued, METH_FASTCALL | METH_KEYWORDS,
                                    PyDoc_STR("See `PlainEngine.issued`.")};
static PyMethodDef finish_method = {"finish", (PyCFunction)(void (*)(void))finish, METH_FASTCALL | METH_KEYWORDS,
                                    PyDoc_STR("See `PlainEngine.finish`.")};

static PyObject *methods(PyObject *module, PyObject *arguments) {
    int version;
    PyTypeObject *engine, *task, *block, *lane, *edges;
    PyObject *by_value, *by_cause;
    if (!PyArg_ParseTuple(arguments, "iO!O!O!O!O!OO", &version, &PyType_Type, &engine, &PyType_Type, &task, &PyType_Type, &block,
                          &PyType_Type, &lane, &PyType_Type, &edges, &by_value, &by_cause))
        return NULL;
    if (version != VERSION) return PyErr_Format(PyExc_ImportError, "version %d instead of %d", VERSION, version);
    if (find_slots(engine, engine_slots) || find_slots(task, task_slots) || find_slots(block, block_slots)
        || find_slots(lane, lane_slots) || find_slots(edges, edges_slots))
        return NULL;
    submit_in_python = PyObject_GetAttrString((PyObject *)engine, "submit");
    issued_in_python = PyObject_GetAttrString((PyObject *)engine, "issued");
    finish_in_python = PyObject_GetAttrString((PyObject *)engine, "finish");
    if (!submit_in_python || !issued_in_python || !finish_in_python) return NULL;
    read_only = Py_NewRef(by_value);
    cancelled_by = Py_NewRef(by_cause);
    Task = (PyTypeObject *)Py_NewRef(task);
    Block = (PyTypeObject *)Py_NewRef(block);
    Lane = (PyTypeObject *)Py_NewRef(lane);
    Edges = (PyTypeObject *)Py_NewRef(edges);
    return Py_BuildValue("NNN", PyDescr_NewMethod(engine, &submit_method), PyDescr_NewMethod(engine, &issued_method),
                         PyDescr_NewMethod(engine, &finish_method));
}

static PyMethodDef functions[] = {
    {"methods", methods, METH_VARARGS,
     PyDoc_STR("The methods `submit`, `issued` and `finish` for a class of engines, given a version, it, Task, Block, "
               "Lane, DeviceEdges, and two functions of tasks.py.")},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_engine", "See engine.c.", -1, functions, NULL, NULL, NULL, NULL};

static int prepare(void) {
    PyObject *heapq = PyImport_ImportModule("heapq");
    if (!heapq) return -1;
    heappush = PyObject_GetAttrString(heapq, "heappush");
    heappop = PyObject_GetAttrString(heapq, "heappop");
    Py_DECREF(heapq);
    for (long state = 0; state <= DONE; state++)
        if (!(states[state] = PyLong_FromLong(state))) return -1;
    s_append = PyUnicode_InternFromString("append");
    s_popleft = PyUnicode_InternFromString("popleft");
    s_unblock = PyUnicode_InternFromString("_unblock");
    s_release = PyUnicode_InternFromString("_release");
    s_settle_all = PyUnicode_InternFromString("_settle_all");
    s_next = PyUnicode_InternFromString("_next");
    return heappush && heappop && s_append && s_popleft && s_unblock && s_release && s_settle_all && s_next ? 0 : -1;
}

PyMODINIT_FUNC PyInit__engine(void) {
    return prepare() ? NULL : PyModule_Create(&module);
}
