//! Reuse of host buffers between steps, and their account.
//!
//! Fresh pages cost more than the arithmetic done on them, so freed buffers are kept by size class and handed
//! out again. A pool belongs to one backend; a buffer returns to it when its tensor is dropped.

use crate::Element;
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

/// Bytes of the buffers of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Held by tensors now.
    pub current: usize,
    /// The most that was held from the system at one time, unused buffers included.
    pub peak: usize,
    /// In unused buffers now, kept for reuse.
    pub unused: usize,
}

/// Free buffers by element type and size class.
#[derive(Default)]
pub struct Pool {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: HashMap<(TypeId, usize), Vec<Box<dyn Any + Send>>>,
    memory: Memory,
    /// The most that tensors held at one time.
    most_used: usize,
}

impl State {
    fn release(&mut self) {
        self.free.clear();
        self.memory.unused = 0;
    }
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
        if len == 0 {
            return Some(Pooled::unpooled(Vec::new()));
        }
        let class = class(len) + ALIGNMENT / size_of::<T>();
        let bytes = class * size_of::<T>();
        let mut state = self.lock();
        let hit = state.free.get_mut(&(TypeId::of::<T>(), class)).and_then(Vec::pop).and_then(|b| b.downcast::<Vec<T>>().ok());
        let data = match hit {
            Some(data) => {
                state.memory.unused -= bytes;
                *data
            }
            None => {
                if state.memory.current + state.memory.unused + bytes > state.most_used + state.most_used / 8 + ALWAYS_KEPT {
                    state.release();
                }
                bytemuck::allocation::try_zeroed_vec(class).ok()?
            }
        };
        state.memory.current += bytes;
        state.most_used = state.most_used.max(state.memory.current);
        state.memory.peak = state.memory.peak.max(state.memory.current + state.memory.unused);
        // Never beyond the room made for it.
        let start = data.as_ptr().align_offset(ALIGNMENT).min(class - len);
        Some(Pooled { data, start, len, home: Arc::downgrade(self) })
    }

    /// Gives all free buffers back to the system.
    pub fn trim(&self) {
        self.lock().release();
    }

    /// The account.
    pub fn memory(&self) -> Memory {
        self.lock().memory
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
}

impl<T: Element> Pooled<T> {
    /// A buffer of no pool.
    pub fn unpooled(data: Vec<T>) -> Pooled<T> {
        Pooled { start: 0, len: data.len(), data, home: Weak::new() }
    }
}

impl<T: Element> Drop for Pooled<T> {
    fn drop(&mut self) {
        if let Some(pool) = self.home.upgrade() {
            let data = std::mem::take(&mut self.data);
            let (key, bytes) = ((TypeId::of::<T>(), data.len()), data.len() * size_of::<T>());
            let mut state = pool.lock();
            state.memory.current -= bytes;
            state.memory.unused += bytes;
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
        let held = pool.memory().current;
        assert!((4000..=4500).contains(&held), "{held}");
        drop(first);
        assert_eq!(pool.memory(), Memory { current: 0, peak: held, unused: held });
        // A slightly different length shares the class; another type does not.
        assert_eq!(pool.take::<f32>(990).unwrap().as_ptr(), address);
        let other = pool.take::<i32>(1000).unwrap();
        assert_eq!(pool.memory().current, held);
        drop(other);
        pool.trim();
        assert_eq!(pool.memory(), Memory { current: 0, peak: 2 * held, unused: 0 });
    }

    #[test]
    fn unused_buffers_do_not_pile_up() {
        let pool = Arc::new(Pool::default());
        for step in 0..40 {
            drop(pool.take::<f32>((step + 4) << 20).unwrap());
        }
        // 40 lengths of up to 172 MiB, which together would be 3.7 GB.
        let memory = pool.memory();
        assert!(memory.peak < 2 * (172 << 20) + ALWAYS_KEPT, "{memory:?}");
    }
}
