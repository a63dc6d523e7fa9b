// Random bits.
#include "../core/dense/random.h"

#include <nanobind/stl/optional.h>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

Outcome philox(nb::handle state_array, nb::handle words_array, nb::handle next_array, bool overlap_checked,
               int threads) {
    Call call;
    const View state(call, state_array, "state", Element::i32),
        words(call, words_array, "words", Element::i64, Access::write),
        next(call, next_array, "next", Element::i32, Access::write);
    for (const View* v : {&state, &next}) v->require().check_contiguous({7});
    words.require().check_vector(words.elements());
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    PhiloxCall philox;
    philox.count = words.elements();
    philox.state = static_cast<const int32_t*>(state.data());
    philox.words = static_cast<int64_t*>(words.data());
    philox.next = static_cast<int32_t*>(next.data());
    run_driver<nb::handle>(4 * double(philox.count), threads, philox, rg::philox);
    return {};
}

}  // namespace

void bind_random(nb::module_& m) {
    m.def("philox", &philox, nb::arg("state"), nb::arg("words"), nb::arg("next"), nb::arg("overlap_checked"),
          nb::arg("threads"), "Words of Philox4x32-10 after a state, and the next state.");
}

}  // namespace rg::bind
