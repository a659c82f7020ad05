// Threads that share the items of a job.
//
// Made for few cores with busy neighbours: items are taken one at a time, so that a thread which
// lost its core holds up nothing but its own item, and nobody waits for a thread that has not begun.
// Workers look for the next job for a while before they sleep: the products of one pass follow each
// other within microseconds, but between passes the cores belong to others.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace rg {

class Pool {
 public:
  // One caller at a time.
  static Pool& get() {
    // Never destroyed: workers may still sleep in it when the process exits.
    static Pool* pool = new Pool;
    return *pool;
  }

  // The calling thread is one of `count`. Threads are only ever added.
  void set_threads(int count) {
    while ((int)workers_ + 1 < count) {
      std::thread([this] { work(); }).detach();
      workers_++;
    }
    limit_ = count;
  }

  int threads() const { return limit_; }

  // body(item) for every item of [0, count), on several threads, in any order.
  template <typename Body>
  void run(int64_t count, const Body& body) {
    if (count <= 0) return;
    if (count == 1 || limit_ <= 1 || busy_) {
      for (int64_t i = 0; i < count; i++) body(i);
      return;
    }
    busy_ = true;
    // First closed, then described, then opened: a worker that still holds the last job's ticket
    // fails to exchange it and so never runs an item of a job it has not read.
    uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(generation << 32 | CLOSED, std::memory_order_seq_cst);
    call_.store([](const void* b, int64_t i) { (*(const Body*)b)(i); }, std::memory_order_release);
    body_.store(&body, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    ticket_.store((generation + 1) << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    while (take_one()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
      pause();
      // A worker without a core cannot finish unless we let go of ours.
      if ((spins & 1023) == 1023) std::this_thread::yield();
    }
    busy_ = false;
  }

  static void pause() {
#ifdef __x86_64__
    _mm_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  }

  // How long a worker looks for work before it sleeps, in rounds of about 20 to 50 ns.
  std::atomic<int> spin_rounds{4000};

 private:
  static constexpr uint64_t CLOSED = 0xffffffffu;

  bool take_one() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      uint64_t item = ticket & 0xffffffffu;
      int64_t count = count_.load(std::memory_order_acquire);
      auto call = call_.load(std::memory_order_acquire);
      const void* body = body_.load(std::memory_order_acquire);
      if (item == CLOSED || (int64_t)item >= count) return false;
      if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_seq_cst)) {
        call(body, (int64_t)item);
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void work() {
    for (;;) {
      // Read before looking for work: a job that comes between is then seen when going to sleep.
      uint64_t seen = generation();
      int rounds = spin_rounds.load(std::memory_order_relaxed);
      for (int i = 0; i < rounds; i++) {
        if (take_one()) {
          seen = generation();
          i = 0;
        }
        pause();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return generation() != seen; });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  uint64_t generation() const { return ticket_.load(std::memory_order_seq_cst) >> 32; }

  std::atomic<uint64_t> ticket_{CLOSED};  // generation of the job, next item
  std::atomic<void (*)(const void*, int64_t)> call_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  int workers_ = 0;
  int limit_ = 1;
  bool busy_ = false;  // a body that runs a job of its own does it alone
};

}  // namespace rg
