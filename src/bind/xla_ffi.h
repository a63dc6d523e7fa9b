// The C interface between XLA and the functions that it calls ("typed FFI"): the part that retrograd uses, declared
// here so that building needs no jaxlib. XLA publishes it as xla/ffi/api/c_api.h, in jaxlib. These structures are the
// same in versions 0.1 to 0.3, which jaxlib has had since 0.5.0.
//
// Every structure begins with its size in bytes. A later version may append fields to it, so a larger one is accepted,
// unless it is embedded in another.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rg::xla {

constexpr int kMajorVersion = 0, kOldestMinorVersion = 1, kNewestMinorVersion = 3;

// Enumerations of C are ints.
enum DataType : int {
    kU8 = 6,
    kS32 = 4,
    kS64 = 5,
    kU32 = 8,
    kU64 = 9,
    kF16 = 10,
    kF32 = 11,
    kF64 = 12,
    kBF16 = 16,
    kPred = 1
};
enum ValueType : int { kBuffer = 1 };  // of an argument or a result
enum AttributeType : int { kArray = 1, kScalar = 3, kString = 4 };
enum ExtensionType : int { kMetadataExtension = 1 };
enum Stage : int { kExecute = 3 };
enum ErrorCode : int { kInvalidArgument = 3, kResourceExhausted = 8, kInternal = 13 };

struct Error;  // XLA's
struct ExecutionContext;

struct Extension {
    size_t size;
    ExtensionType type;
    Extension* next;
};

struct Version {
    size_t size;
    Extension* extensions;
    int major_version, minor_version;
};

struct ErrorArguments {
    size_t size;
    Extension* extensions;
    const char* message;  // copied
    ErrorCode code;
};

// XLA's functions; the rest is not used here.
struct Api {
    size_t size;
    Extension* extensions;
    Version version;
    const void* internal;
    Error* (*create_error)(ErrorArguments* arguments);
};

struct Buffer {
    size_t size;
    Extension* extensions;
    DataType dtype;
    void* data;
    int64_t rank;
    int64_t* extents;
};

struct Text {
    const char* data;
    size_t length;
};

struct Scalar {
    DataType dtype;
    void* value;
};

struct Array {
    DataType dtype;
    size_t elements;
    void* data;
};

// Arguments or results.
struct Values {
    size_t size;
    Extension* extensions;
    int64_t count;
    ValueType* types;
    void** values;
};

struct Attributes {
    size_t size;
    Extension* extensions;
    int64_t count;
    AttributeType* types;
    Text** names;
    void** values;
};

struct CallFrame {
    size_t size;  // without what follows the attributes
    Extension* extensions;
    const Api* api;
    ExecutionContext* context;
    Stage stage;
    Values arguments, results;
    Attributes attributes;
};

// What XLA asks of a handler when it is registered.
struct Metadata {
    size_t size;
    Version version;  // out: of the interface that the handler uses
    uint32_t traits;
};

struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

// XLA returns errors to the caller. Null: success.
using Handler = Error*(CallFrame* frame);

}  // namespace rg::xla
