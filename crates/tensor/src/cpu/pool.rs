//! Reuse of host buffers between steps, and their account.
//!
//! Fresh pages cost more than the arithmetic done on them, so freed buffers are kept by size class and handed
//! out again. A pool belongs to one backend; a buffer returns to it when its tensor is dropped.

use crate::{Element, MemoryUse, Purpose};
use std::{
    any::{Any, TypeId},
    collections::HashMap,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

/// Unused bytes a pool keeps whatever is in use.
const ALWAYS_KEPT: usize = 64 << 20;
/// Buffers start at a line of the cache, so that no vector of a row straddles two.
const ALIGNMENT: usize = 64;

/// Free buffers by element type and size class.
#[derive(Default)]
pub struct Pool {
    state: Mutex<State>,
}

struct State {
    free: HashMap<(TypeId, usize), Vec<Box<dyn Any + Send>>>,
    /// Elements of tensors; `reserved` counts whole buffers, the free ones too.
    usage: MemoryUse,
    /// What new buffers count as.
    purpose: Purpose,
    /// Bytes of the buffers of tensors.
    used: usize,
    /// The most that they were at one time.
    most_used: usize,
}

impl Default for State {
    fn default() -> State {
        let usage = MemoryUse { capacity: physical_memory(), ..MemoryUse::default() };
        State { free: HashMap::new(), usage, purpose: Purpose::Activations, used: 0, most_used: 0 }
    }
}

impl State {
    fn release(&mut self) {
        self.free.clear();
        self.usage.reserved = self.used;
    }
}

/// Bytes of memory of this machine; 0 where the system does not tell.
pub fn physical_memory() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|l| l.strip_prefix("MemTotal:")).and_then(|l| l.split_whitespace().next()?.parse::<usize>().ok());
    kib.unwrap_or(0) * 1024
}

/// Elements of the smallest class that holds `len`: steps of an eighth of a power of two, so at most 1/8 is wasted
/// and batches of slightly different lengths share buffers.
fn class(len: usize) -> usize {
    let step = (len.next_power_of_two() / 16).max(1);
    len.next_multiple_of(step)
}

impl Pool {
    /// A buffer of `len` elements with unspecified (but initialised) contents; none when the system has no memory for it.
    pub fn take<T: Element>(self: &Arc<Pool>, len: usize) -> Option<Pooled<T>> {
        self.counted(None, len)
    }

    /// As [`Pool::take`], for the scratch of a single operation.
    pub fn take_scratch<T: Element>(self: &Arc<Pool>, len: usize) -> Option<Pooled<T>> {
        self.counted(Some(Purpose::Workspace), len)
    }

    fn counted<T: Element>(self: &Arc<Pool>, purpose: Option<Purpose>, len: usize) -> Option<Pooled<T>> {
        if len == 0 {
            return Some(Pooled::unpooled(Vec::new()));
        }
        let class = class(len) + ALIGNMENT / size_of::<T>();
        let bytes = class * size_of::<T>();
        let mut state = self.lock();
        let hit = state.free.get_mut(&(TypeId::of::<T>(), class)).and_then(Vec::pop).and_then(|b| b.downcast::<Vec<T>>().ok());
        let data = match hit {
            Some(data) => *data,
            None => {
                if state.usage.reserved + bytes > state.most_used + state.most_used / 8 + ALWAYS_KEPT {
                    state.release();
                }
                let data = bytemuck::allocation::try_zeroed_vec(class).ok()?;
                state.usage.reserved += bytes;
                state.usage.growths += 1;
                data
            }
        };
        let purpose = purpose.unwrap_or(state.purpose);
        // What lies beyond the elements of a fresh buffer is never touched, so that the system has no memory behind it.
        state.usage.take(purpose, len * size_of::<T>());
        state.used += bytes;
        state.most_used = state.most_used.max(state.used);
        // Never beyond the room made for it.
        let start = data.as_ptr().align_offset(ALIGNMENT).min(class - len);
        Some(Pooled { data, start, len, home: Arc::downgrade(self), purpose })
    }

    /// What buffers count as from here on. Returns what they counted as so far.
    pub fn account(&self, purpose: Purpose) -> Purpose {
        std::mem::replace(&mut self.lock().purpose, purpose)
    }

    /// What buffers count as.
    pub fn purpose(&self) -> Purpose {
        self.lock().purpose
    }

    /// Starts the peaks anew.
    pub fn reset_peak(&self) {
        self.lock().usage.reset_peak();
    }

    /// Gives all free buffers back to the system.
    pub fn trim(&self) {
        self.lock().release();
    }

    /// The account.
    pub fn usage(&self) -> MemoryUse {
        self.lock().usage
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A vector that returns to its pool when dropped.
pub struct Pooled<T: Element> {
    /// As long as its size class and some room to align.
    data: Vec<T>,
    start: usize,
    len: usize,
    home: Weak<Pool>,
    purpose: Purpose,
}

impl<T: Element> Pooled<T> {
    /// A buffer of no pool.
    pub fn unpooled(data: Vec<T>) -> Pooled<T> {
        Pooled { start: 0, len: data.len(), data, home: Weak::new(), purpose: Purpose::Activations }
    }
}

impl<T: Element> Drop for Pooled<T> {
    fn drop(&mut self) {
        if let Some(pool) = self.home.upgrade() {
            let data = std::mem::take(&mut self.data);
            let (key, bytes) = ((TypeId::of::<T>(), data.len()), data.len() * size_of::<T>());
            let mut state = pool.lock();
            state.usage.give(self.purpose, self.len * size_of::<T>());
            state.used -= bytes;
            state.free.entry(key).or_default().push(Box::new(data));
        }
    }
}

impl<T: Element> Deref for Pooled<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data[self.start..self.start + self.len]
    }
}

impl<T: Element> DerefMut for Pooled<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_accounted() {
        let pool = Arc::new(Pool::default());
        let first = pool.take::<f32>(1000).unwrap();
        let address = first.as_ptr();
        assert_eq!(first.len(), 1000);
        let held = pool.usage().reserved;
        assert!((4000..=4500).contains(&held), "{held}");
        assert_eq!(pool.usage().now[Purpose::Activations as usize], 4000, "the elements, not their size class");
        drop(first);
        let usage = pool.usage();
        assert_eq!((usage.now, usage.peak_total, usage.reserved, usage.growths), ([0; 6], 4000, held, 1));
        // A slightly different length shares the class; another type does not.
        assert_eq!(pool.take::<f32>(990).unwrap().as_ptr(), address);
        let other = pool.take::<i32>(1000).unwrap();
        assert_eq!(pool.usage().reserved, 2 * held);
        drop(other);
        pool.trim();
        assert_eq!((pool.usage().now, pool.usage().reserved), ([0; 6], 0));
    }

    /// A buffer counts as what it was taken for until it is dropped, whatever is taken meanwhile.
    #[test]
    fn memory_is_told_by_purpose() {
        let pool = Arc::new(Pool::default());
        assert_eq!(pool.account(Purpose::Weights), Purpose::Activations);
        let weights = pool.take::<f32>(4096).unwrap();
        assert_eq!(pool.account(Purpose::Optimizer), Purpose::Weights);
        let moments = pool.take::<f32>(8192).unwrap();
        let by = |usage: [usize; 6]| [Purpose::Weights, Purpose::Optimizer, Purpose::Activations].map(|p| usage[p as usize]);
        let (small, large) = (4 * 4096, 4 * 8192);
        assert_eq!(by(pool.usage().now), [small, large, 0]);
        drop(weights);
        let peak = ([small, large, 0], small + large);
        assert_eq!((by(pool.usage().now), by(pool.usage().peak), pool.usage().peak_total), ([0, large, 0], peak.0, peak.1));
        pool.reset_peak();
        assert_eq!((by(pool.usage().peak), pool.usage().peak_total), ([0, large, 0], large));
        drop(moments);
    }

    #[test]
    fn unused_buffers_do_not_pile_up() {
        let pool = Arc::new(Pool::default());
        let mut most = 0;
        for step in 0..40 {
            drop(pool.take::<f32>((step + 4) << 20).unwrap());
            most = most.max(pool.usage().reserved);
        }
        // 40 lengths of up to 172 MiB, which together would be 3.7 GB.
        assert!(most < 2 * (172 << 20) + ALWAYS_KEPT, "{most}");
    }
}
