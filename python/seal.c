/* seal.c - qeffect._seal: is what captured work stands on still what it was? This is asked before every replay, so it
 * is one call that compares pointers, where Python would need several calls for each tensor.
 *
 *   Torch(offset, kinds, functions)                    torch's functions for what it is asked about a tensor
 *   Places(owners, keys, values, addresses, torch)     what dictionaries held, and where tensors lay
 *   attributes(objects, name)                          an attribute of each, such as how often a tensor was written
 *   Issuer(issue, ledger, violations, items)           a ledger that is asked about planned items
 *
 * The functions take the at::Tensor that is `offset` bytes into torch's Python object. qeffect/torch/inside.py finds
 * them and the offset while it runs, and holds their answers against those of torch's Python before they are used;
 * nothing of torch is known here. Everything runs under the interpreter's lock. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "qeffect/ledger.h"

enum { KINDS = 2, RANK_MAX = 16 }; /* tensors of more dimensions are left to Python */

/* torch's stable interface for C. None of them lets an exception out; 0: it told. */
typedef struct functions {
    int32_t (*data_ptr)(const void *tensor, void **address_out);
    int32_t (*rank)(const void *tensor, int64_t *rank_out);
    int32_t (*sizes)(const void *tensor, int64_t **sizes_out);
    int32_t (*dtype)(const void *tensor, int32_t *dtype_out);
    int32_t (*device_type)(const void *tensor, int32_t *type_out);
    int32_t (*device_index)(const void *tensor, int32_t *index_out);
} functions;
enum { FUNCTIONS = 6 };
_Static_assert(sizeof(functions) == FUNCTIONS * sizeof(uintptr_t), "a function's address is a word");

typedef struct torch_inside {
    PyObject_HEAD
    Py_ssize_t offset;
    PyTypeObject *kinds[KINDS]; /* whose objects are torch's own; no references: torch's types live as long as torch */
    functions functions;
} torch_inside;

/* What of a tensor an argument must share with the one that was captured. */
typedef struct look {
    int32_t dtype, device_type, device_index, padding;
    int64_t rank, sizes[RANK_MAX];
} look;

/* owner[key] was `value` (NULL: there was no such key), a tensor whose bytes lay at `address` where `is_placed`. Where
 * key is NULL: owner had as many keys as `address` says. */
typedef struct place {
    PyObject *owner, *key, *value;
    void *address;
    int is_placed;
} place;

typedef struct places {
    PyObject_HEAD
    Py_ssize_t count;
    place *place;
    const torch_inside *torch; /* owned; NULL where no address is asked for */
} places;

static const void *tensor_in(const torch_inside *self, const void *object) {
    return (const char *)object + self->offset;
}

/* ---- Places ---- */

static int has_changed(const places *self, const place *at) {
    if (at->key == NULL) return PyDict_Size(at->owner) != (Py_ssize_t)(intptr_t)at->address;
    const PyObject *now = PyDict_GetItemWithError(at->owner, at->key);
    if (now == NULL && PyErr_Occurred() != NULL) return -1;
    if (now != at->value) return 1;
    if (!at->is_placed) return 0;
    void *address = NULL;
    int32_t status = self->torch->functions.data_ptr(tensor_in(self->torch, now), &address);
    return status != 0 || address != at->address;
}

static PyObject *places_changed(PyObject *object, PyObject *nothing) {
    const places *self = (const places *)object;
    (void)nothing;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        int changed = has_changed(self, &self->place[i]);
        if (changed < 0) return NULL;
        if (changed) return PyLong_FromSsize_t(i);
    }
    return PyLong_FromLong(-1);
}

/* Takes the i-th place over. Returns 0, or -1 with an exception set. */
static int take_place(places *self, Py_ssize_t i, PyObject *rows[4]) {
    PyObject *owner = PyTuple_GetItem(rows[0], i), *key = PyTuple_GetItem(rows[1], i);
    PyObject *value = PyTuple_GetItem(rows[2], i), *address = PyTuple_GetItem(rows[3], i);
    place *into = &self->place[i];
    if (owner == NULL || key == NULL || value == NULL || address == NULL) return -1;
    if (!PyDict_Check(owner)) {
        PyErr_SetString(PyExc_TypeError, "an owner is no dictionary");
        return -1;
    }
    into->is_placed = address != Py_None;
    into->address = into->is_placed ? PyLong_AsVoidPtr(address) : NULL;
    if (into->is_placed && key != Py_None && self->torch == NULL)
        PyErr_SetString(PyExc_TypeError, "an address without torch's functions");
    if (PyErr_Occurred() != NULL) return -1;
    into->owner = Py_NewRef(owner);
    into->key = key == Py_None ? NULL : Py_NewRef(key);
    into->value = value == Py_Ellipsis ? NULL : Py_NewRef(value);
    return 0;
}

static PyObject *places_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *rows[4], *torch;
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!O", &PyTuple_Type, &rows[0], &PyTuple_Type, &rows[1], &PyTuple_Type,
                          &rows[2], &PyTuple_Type, &rows[3], &torch)) return NULL;
    places *self = (places *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    Py_ssize_t count = PyTuple_Size(rows[0]);
    self->torch = torch == Py_None ? NULL : (const torch_inside *)Py_NewRef(torch);
    self->place = PyMem_Calloc((size_t)count + 1, sizeof *self->place);
    if (self->place == NULL) PyErr_NoMemory();
    for (; PyErr_Occurred() == NULL && self->count < count; self->count++)
        if (take_place(self, self->count, rows) != 0) break;
    if (PyErr_Occurred() == NULL) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static int places_traverse(PyObject *object, visitproc visit, void *arg) {
    const places *self = (const places *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->place[i].owner);
        Py_VISIT(self->place[i].key);
        Py_VISIT(self->place[i].value);
    }
    return 0;
}

static int places_clear(PyObject *object) {
    places *self = (places *)object;
    Py_ssize_t count = self->count;
    self->count = 0; /* first: what goes away may ask */
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_CLEAR(self->place[i].owner);
        Py_CLEAR(self->place[i].key);
        Py_CLEAR(self->place[i].value);
    }
    return 0;
}

static void places_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    places *self = (places *)object;
    PyObject_GC_UnTrack(object);
    places_clear(object);
    Py_XDECREF((PyObject *)(uintptr_t)self->torch);
    PyMem_Free(self->place);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef places_methods[] = {
    {"changed", places_changed, METH_NOARGS, "Index of the first place that is not as it was; -1: all are."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot places_slots[] = {
    {Py_tp_doc, "What dictionaries held under keys, and where tensors in them lay."},
    {Py_tp_new, places_new}, {Py_tp_traverse, places_traverse}, {Py_tp_clear, places_clear},
    {Py_tp_dealloc, places_dealloc}, {Py_tp_methods, places_methods}, {0, NULL}};
static PyType_Spec places_spec = {"qeffect._seal.Places", (int)sizeof(places), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, places_slots};

/* ---- Torch ---- */

static int is_plain(const torch_inside *self, PyObject *argument) {
    return Py_TYPE(argument) == self->kinds[0] || Py_TYPE(argument) == self->kinds[1];
}

/* Returns the bytes of *into that tell about the tensor; 0 where torch does not tell, or it has too many dimensions. */
static size_t look_at(const torch_inside *self, PyObject *argument, look *into) {
    const functions *of = &self->functions;
    const void *tensor = tensor_in(self, argument);
    int64_t *sizes = NULL;
    if (of->rank(tensor, &into->rank) != 0 || into->rank < 0 || into->rank > RANK_MAX) return 0;
    if (of->dtype(tensor, &into->dtype) != 0 || of->sizes(tensor, &sizes) != 0) return 0;
    if (of->device_type(tensor, &into->device_type) != 0) return 0;
    if (of->device_index(tensor, &into->device_index) != 0) return 0;
    into->padding = 0;
    size_t bytes = (size_t)into->rank * sizeof *sizes;
    if (bytes > 0) memcpy(into->sizes, sizes, bytes);
    return offsetof(look, sizes) + bytes;
}

static PyObject *torch_look(PyObject *object, PyObject *argument) {
    const torch_inside *self = (const torch_inside *)object;
    look found;
    size_t bytes = is_plain(self, argument) ? look_at(self, argument, &found) : 0;
    if (bytes == 0) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)&found, (Py_ssize_t)bytes);
}

/* `expected`: what torch_look told of the captured argument. */
static int fits(const torch_inside *self, PyObject *argument, PyObject *expected) {
    look now;
    if (argument == NULL || expected == NULL || !PyBytes_Check(expected) || !is_plain(self, argument)) return 0;
    size_t bytes = look_at(self, argument, &now);
    return bytes > 0 && PyBytes_Size(expected) == (Py_ssize_t)bytes &&
           memcmp(&now, PyBytes_AsString(expected), bytes) == 0;
}

static PyObject *torch_fit(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    const torch_inside *self = (const torch_inside *)object;
    int is_list = count == 2 && PyList_Check(given[1]);
    if (count != 2 || !PyTuple_Check(given[0]) || !(is_list || PyTuple_Check(given[1]))) {
        PyErr_SetString(PyExc_TypeError, "fit(looks: tuple, arguments: list or tuple)");
        return NULL;
    }
    Py_ssize_t arguments = is_list ? PyList_Size(given[1]) : PyTuple_Size(given[1]);
    if (arguments != PyTuple_Size(given[0])) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < arguments; i++) {
        PyObject *argument = is_list ? PyList_GetItem(given[1], i) : PyTuple_GetItem(given[1], i);
        if (!fits(self, argument, PyTuple_GetItem(given[0], i))) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *torch_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *kinds, *addresses;
    Py_ssize_t offset;
    uintptr_t words[FUNCTIONS] = {0};
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "nO!O!", &offset, &PyTuple_Type, &kinds, &PyTuple_Type, &addresses)) return NULL;
    if (PyTuple_Size(kinds) != KINDS || PyTuple_Size(addresses) != FUNCTIONS) {
        PyErr_SetString(PyExc_TypeError, "Torch(offset: int, kinds: 2 types, functions: 6 addresses)");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < FUNCTIONS; i++) words[i] = (uintptr_t)PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
    torch_inside *self = PyErr_Occurred() == NULL ? (torch_inside *)PyType_GenericAlloc(type, 0) : NULL;
    if (self == NULL) return NULL;
    self->offset = offset;
    for (Py_ssize_t i = 0; i < KINDS; i++) self->kinds[i] = (PyTypeObject *)PyTuple_GetItem(kinds, i);
    memcpy(&self->functions, words, sizeof self->functions);
    return (PyObject *)self;
}

static void plain_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* A cast through another function type is how CPython wants its tables filled. */
#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef torch_methods[] = {
    {"look", torch_look, METH_O, "What of a tensor `fit` compares; None for what it cannot tell."},
    {"fit", METHOD(torch_fit), METH_FASTCALL, "Every argument looks like the one that was captured."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot torch_slots[] = {{Py_tp_doc, "torch's functions for what is asked about tensors at every replay."},
                                    {Py_tp_new, torch_new}, {Py_tp_dealloc, plain_dealloc},
                                    {Py_tp_methods, torch_methods}, {0, NULL}};
static PyType_Spec torch_spec = {"qeffect._seal.Torch", (int)sizeof(torch_inside), 0, Py_TPFLAGS_DEFAULT, torch_slots};

/* ---- Issuer ---- */

/* qe_ledger_issue, which is in the library beside this one. */
typedef qe_status issue_function(qe_ledger *ledger, uint32_t index, qe_violations *violations_out);

typedef struct issuer {
    PyObject_HEAD
    issue_function *issue;
    qe_ledger *ledger; /* its owner keeps both */
    qe_violations *violations;
    uint32_t items; /* of the ledger's program */
} issuer;

static PyObject *issuer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *addresses[3];
    unsigned int items;
    void *words[3];
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "OOOI", &addresses[0], &addresses[1], &addresses[2], &items)) return NULL;
    for (int i = 0; i < 3; i++) words[i] = PyLong_AsVoidPtr(addresses[i]);
    issuer *self = PyErr_Occurred() == NULL ? (issuer *)PyType_GenericAlloc(type, 0) : NULL;
    if (self == NULL) return NULL;
    self->issue = (issue_function *)(uintptr_t)words[0];
    self->ledger = words[1];
    self->violations = words[2];
    self->items = items;
    return (PyObject *)self;
}

static PyObject *issuer_issue(PyObject *object, PyObject *items) {
    const issuer *self = (const issuer *)object;
    if (!PyTuple_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "issue(items: tuple)");
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(items);
    qe_status status = QE_OK;
    for (Py_ssize_t i = 0; i < count && status == QE_OK; i++) {
        unsigned long index = PyLong_AsUnsignedLong(PyTuple_GetItem(items, i));
        if (PyErr_Occurred() == NULL && index >= self->items)
            PyErr_Format(PyExc_IndexError, "item %lu of a program of %u items", index, (unsigned int)self->items);
        if (PyErr_Occurred() != NULL) return NULL;
        status = self->issue(self->ledger, (uint32_t)index, self->violations);
    }
    return PyLong_FromLong((long)status);
}

static PyMethodDef issuer_methods[] = {
    {"issue", issuer_issue, METH_O, "Submits items one after the other, up to the first that is refused; its status."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot issuer_slots[] = {{Py_tp_doc, "Asks a ledger about planned items, under the interpreter's lock."},
                                     {Py_tp_new, issuer_new}, {Py_tp_dealloc, plain_dealloc},
                                     {Py_tp_methods, issuer_methods}, {0, NULL}};
static PyType_Spec issuer_spec = {"qeffect._seal.Issuer", (int)sizeof(issuer), 0, Py_TPFLAGS_DEFAULT, issuer_slots};

/* ---- the module ---- */

static PyObject *attributes(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyTuple_Check(given[0])) {
        PyErr_SetString(PyExc_TypeError, "attributes(objects: tuple, name: str)");
        return NULL;
    }
    Py_ssize_t objects = PyTuple_Size(given[0]);
    PyObject *found = PyTuple_New(objects);
    for (Py_ssize_t i = 0; found != NULL && i < objects; i++) {
        PyObject *value = PyObject_GetAttr(PyTuple_GetItem(given[0], i), given[1]);
        if (value == NULL || PyTuple_SetItem(found, i, value) != 0) Py_CLEAR(found);
    }
    return found;
}

static PyMethodDef module_functions[] = {
    {"attributes", METHOD(attributes), METH_FASTCALL, "The attribute of each object."}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_seal", NULL, -1, module_functions,
                                        NULL, NULL, NULL, NULL};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    int status = type == NULL ? -1 : PyModule_AddObjectRef(module, name, type);
    Py_XDECREF(type);
    return status;
}

PyMODINIT_FUNC PyInit__seal(void);
PyMODINIT_FUNC PyInit__seal(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (add_type(module, "Torch", &torch_spec) == 0 && add_type(module, "Places", &places_spec) == 0 &&
        add_type(module, "Issuer", &issuer_spec) == 0) return module;
    Py_DECREF(module);
    return NULL;
}
