// oneCCL's C++ interface as plain C functions, for ctypes (library.py).
//
// oneCCL's own C interface blocks the caller on host memory; its C++ interface does not, and
// its objects (communicator, event) cannot be named from Python. So each is a heap object here,
// given out as a pointer that the caller frees.
//
// A function that fails returns null or -1, and last_error() of the same thread says why: an
// exception must not cross into the interpreter.

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "oneapi/ccl.hpp"

namespace {

thread_local std::string error;

// What two ranks need to find each other, and the communicator once they have.
struct Pair {
    std::shared_ptr<ccl::kvs> meeting;
    std::optional<ccl::communicator> communicator;
};

template <typename Result, typename Body>
Result guarded(Result failure, Body body) {
    try {
        return body();
    } catch (const std::exception& caught) {
        error = caught.what();
    } catch (...) {
        error = "oneCCL threw something that is no std::exception";
    }
    return failure;
}

}  // namespace

extern "C" {

const char* last_error() { return error.c_str(); }

// Reads the CCL_ variables of the environment. Once per process, before anything else.
int initialize() {
    return guarded(-1, [] {
        ccl::init();
        return 0;
    });
}

std::size_t address_size() { return std::tuple_size<ccl::kvs::address_type>::value; }

// The rank that offers writes the address at which the other finds it.
Pair* offer(char* address) {
    return guarded<Pair*>(nullptr, [&] {
        auto pair = std::make_unique<Pair>();
        pair->meeting = ccl::create_main_kvs();
        const auto where = pair->meeting->get_address();
        std::memcpy(address, where.data(), where.size());
        return pair.release();
    });
}

Pair* answer(const char* address) {
    return guarded<Pair*>(nullptr, [&] {
        ccl::kvs::address_type where;
        std::memcpy(where.data(), address, where.size());
        auto pair = std::make_unique<Pair>();
        pair->meeting = ccl::create_kvs(where);
        return pair.release();
    });
}

// Blocks until the other rank connects the same pair.
int connect_pair(Pair* pair, int rank) {
    return guarded(-1, [&] {
        pair->communicator.emplace(ccl::create_communicator(2, rank, pair->meeting));
        return 0;
    });
}

void free_pair(Pair* pair) { delete pair; }

// The memory belongs to the caller and must live until the event is complete.
ccl::event* post_send(Pair* pair, void* bytes, std::size_t count, int to) {
    return guarded<ccl::event*>(nullptr, [&] {
        return new ccl::event(
            ccl::send(bytes, count, ccl::datatype::uint8, to, *pair->communicator));
    });
}

ccl::event* post_receive(Pair* pair, void* bytes, std::size_t count, int from) {
    return guarded<ccl::event*>(nullptr, [&] {
        return new ccl::event(
            ccl::recv(bytes, count, ccl::datatype::uint8, from, *pair->communicator));
    });
}

// 1: complete, 0: not yet.
int test_event(ccl::event* event) {
    return guarded(-1, [&] { return static_cast<int>(event->test()); });
}

int wait_event(ccl::event* event) {
    return guarded(-1, [&] {
        event->wait();
        return 0;
    });
}

void free_event(ccl::event* event) { delete event; }

}  // extern "C"
