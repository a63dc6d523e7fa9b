// One call from XLA: its attributes, and its arguments and results by name.
//
// retrograd.jax passes the names of the arguments and of the results as attributes, so that any of them may be absent.
// Under jax.vmap every array gets a leading axis, of extent 1 if the array is not mapped (the method "expand_dims");
// nested calls of vmap add several. A frame is then a batch of calls. The attribute `axes` is the number of axes of
// the first argument without them.
#pragma once

#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../core/base/memory.h"
#include "view.h"
#include "xla_ffi.h"

namespace rg::bind {

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }

class Frame {
public:
    explicit Frame(const xla::CallFrame& frame)
        : attributes_(frame.attributes),
          arguments_(arrays(frame.arguments, text("arguments"))),
          results_(arrays(frame.results, text("results"))) {
        if (arguments_.empty() || results_.empty()) fail("a call has at least one argument and one result");
        batch_axes_ = arguments_[0].buffer->rank - integer("axes");
        if (batch_axes_ < 0 || batch_axes_ > results_[0].buffer->rank) fail("axes is out of range");
        for (const Named& one : arguments_) check_batch(one, true);
        for (const Named& one : results_) check_batch(one, false);
        for (int64_t axis = 0; axis < batch_axes_; ++axis) calls_ *= batch_extent(axis);
        for (Named* one : everything()) one->skip_axes(batch_axes_);
        for (const Named& one : results_) {
            const size_t bytes = one.bytes();
            if (bytes >= kAlwaysFresh) prefer_huge_pages(one.buffer->data, bytes);
        }
    }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;

    // ---- attributes

    int64_t integer(const char* name) const { return scalar<int64_t>(name, xla::kS64); }
    double number(const char* name) const { return scalar<double>(name, xla::kF64); }
    bool flag(const char* name) const { return scalar<bool>(name, xla::kPred); }
    std::string_view text(const char* name) const {
        const auto* text = static_cast<const xla::Text*>(attribute(name, xla::kString));
        return {text->data, text->length};
    }
    const double* numbers(const char* name, size_t count) const {
        const auto* array = static_cast<const xla::Array*>(attribute(name, xla::kArray));
        if (array->dtype != xla::kF64 || array->elements != count) fail(std::string(name) + " has the wrong form");
        return static_cast<const double*>(array->data);
    }

    // ---- the batch

    // The number of calls, and the choice of one of them, whose arrays the functions below return.
    int64_t calls() const { return calls_; }
    void select(int64_t call) {
        for (Named* one : everything()) {
            int64_t rest = call, offset = 0;
            for (int64_t axis = one->skipped; axis-- > 0;) {
                const int64_t extent = batch_extent(axis);
                if (one->buffer->extents[axis] != 1) offset += rest % extent * one->strides[size_t(axis)];
                rest /= extent;
            }
            one->array.data = static_cast<char*>(one->buffer->data) + offset;
        }
    }
    // Turns the batch into one call, whose arrays have the batch's axes too, except the arrays in `shared`; returns how
    // many these are. Only if no argument of `shared` is mapped, and all others are mapped over all axes; else it
    // returns 0.
    int64_t fold(std::initializer_list<std::string_view> shared) {
        const auto is_shared = [&](const Named& one) {
            return std::find(shared.begin(), shared.end(), one.name) != shared.end();
        };
        for (const Named& one : arguments_) {
            for (int64_t axis = 0; axis < batch_axes_; ++axis) {
                if (one.buffer->extents[axis] != (is_shared(one) ? 1 : batch_extent(axis))) return 0;
            }
        }
        calls_ = 1;
        for (Named* one : everything()) one->skip_axes(is_shared(*one) ? batch_axes_ : 0);
        return batch_axes_;
    }

    // ---- arrays

    // Null: absent.
    const RawArray* argument(std::string_view name) const { return find(arguments_, name); }
    const RawArray* result(std::string_view name) const { return find(results_, name); }
    const RawArray& required(std::string_view name) const {
        const RawArray* array = argument(name);
        if (!array) fail(std::string(name) + " is missing");
        return *array;
    }
    // Sets all results of all calls to 0.
    void clear_results() const {
        for (const Named& one : results_) {
            if (one.bytes()) std::memset(one.buffer->data, 0, one.bytes());
        }
    }

private:
    // From this size on, the C library that XLA allocates with maps new pages every time: results of the array
    // functions reuse memory, XLA's pay for a page fault per page.
    static constexpr size_t kAlwaysFresh = 32u << 20;

    struct Named {
        std::string_view name;
        const xla::Buffer* buffer;
        std::vector<int64_t> strides;  // in bytes
        RawArray array;                // of the selected call
        int64_t skipped = 0;           // how many leading axes it does not have

        Named(std::string_view name, const xla::Buffer& from)
            : name(name), buffer(&from), strides(size_t(from.rank)), array{} {
            array.element = element_of(from.dtype, name);
            int64_t step = item_size(array.element);
            for (int64_t axis = from.rank; axis-- > 0; step *= from.extents[axis]) strides[size_t(axis)] = step;
        }
        size_t bytes() const {
            int64_t total = item_size(array.element);
            for (int64_t axis = 0; axis < buffer->rank; ++axis) total *= buffer->extents[axis];
            return size_t(total);
        }
        void skip_axes(int64_t count) {
            skipped = count;
            array.data = static_cast<char*>(buffer->data);
            array.ndim = int(buffer->rank - count);
            array.shape = buffer->extents + count;
            array.strides = strides.data() + count;
        }
    };

    static Element element_of(xla::DataType dtype, std::string_view name) {
        switch (dtype) {
            case xla::kF32:
                return Element::f32;
            case xla::kF64:
                return Element::f64;
            case xla::kF16:
                return Element::f16;
            case xla::kBF16:
                return Element::bf16;
            case xla::kU8:
                return Element::u8;
            case xla::kS32:
            case xla::kU32:
                return Element::i32;
            case xla::kS64:
            case xla::kU64:
                return Element::i64;
            default:
                fail(std::string(name) + " has an unknown dtype");
        }
    }

    // Arguments or results, with their names, which are separated by spaces.
    static std::vector<Named> arrays(const xla::Values& values, std::string_view names) {
        std::vector<Named> found;
        while (!names.empty()) {
            const size_t end = std::min(names.find(' '), names.size());
            const size_t i = found.size();
            if (int64_t(i) >= values.count || values.types[i] != xla::kBuffer) fail("a name belongs to no buffer");
            const auto* buffer = static_cast<const xla::Buffer*>(values.values[i]);
            if (buffer->size < sizeof(xla::Buffer)) fail("XLA describes buffers in an unknown way");
            if (buffer->rank > kMaxAxes) fail("an array has too many axes");
            found.emplace_back(names.substr(0, end), *buffer);
            names.remove_prefix(std::min(end + 1, names.size()));
        }
        if (int64_t(found.size()) != values.count) fail("a buffer has no name");
        return found;
    }
    std::vector<Named*> everything() {
        std::vector<Named*> all;
        for (Named& one : arguments_) all.push_back(&one);
        for (Named& one : results_) all.push_back(&one);
        return all;
    }
    int64_t batch_extent(int64_t axis) const { return results_[0].buffer->extents[axis]; }
    void check_batch(const Named& one, bool may_be_shared) const {
        bool good = one.buffer->rank >= batch_axes_;
        for (int64_t axis = 0; good && axis < batch_axes_; ++axis) {
            const int64_t extent = one.buffer->extents[axis];
            good = extent == batch_extent(axis) || (extent == 1 && may_be_shared);
        }
        if (!good) fail(std::string(one.name) + " does not have the axes of the batch");
    }
    static const RawArray* find(const std::vector<Named>& list, std::string_view name) {
        for (const Named& one : list) {
            if (one.name == name) return &one.array;
        }
        return nullptr;
    }

    const void* attribute(const char* name, xla::AttributeType type) const {
        for (int64_t i = 0; i < attributes_.count; ++i) {
            const xla::Text& found = *attributes_.names[i];
            if (std::string_view(found.data, found.length) != name) continue;
            if (attributes_.types[i] != type) break;
            return attributes_.values[i];
        }
        fail("the attribute " + std::string(name) + " is missing or of another type");
    }
    template <class T>
    T scalar(const char* name, xla::DataType dtype) const {
        const auto* scalar = static_cast<const xla::Scalar*>(attribute(name, xla::kScalar));
        if (scalar->dtype != dtype) fail("the attribute " + std::string(name) + " has the wrong dtype");
        T value;
        std::memcpy(&value, scalar->value, sizeof value);
        return value;
    }

    const xla::Attributes& attributes_;
    std::vector<Named> arguments_, results_;
    int64_t batch_axes_ = 0, calls_ = 1;
};

}  // namespace rg::bind
