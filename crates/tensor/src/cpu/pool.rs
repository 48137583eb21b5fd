//! Reuse of host buffers between steps.
//!
//! Fresh pages cost more than the arithmetic done on them, so freed buffers are kept by size and handed
//! out again. A pool belongs to one backend; a buffer returns to it when its tensor is dropped.

use crate::Element;
use std::{
    any::{Any, TypeId},
    collections::HashMap,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, Weak},
};

/// Free buffers by element type and length.
#[derive(Default)]
pub struct Pool {
    free: Mutex<HashMap<(TypeId, usize), Vec<Box<dyn Any + Send>>>>,
}

impl Pool {
    /// A buffer of `len` elements with unspecified (but initialised) contents.
    pub fn take<T: Element>(self: &Arc<Pool>, len: usize) -> Pooled<T> {
        let key = (TypeId::of::<T>(), len);
        let hit = self.lock().get_mut(&key).and_then(Vec::pop);
        let data = hit.and_then(|b| b.downcast::<Vec<T>>().ok()).map_or_else(|| vec![T::default(); len], |b| *b);
        Pooled { data, home: Arc::downgrade(self) }
    }

    /// Gives all free buffers back to the system.
    pub fn trim(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(TypeId, usize), Vec<Box<dyn Any + Send>>>> {
        self.free.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A vector that returns to its pool when dropped.
pub struct Pooled<T: Element> {
    data: Vec<T>,
    home: Weak<Pool>,
}

impl<T: Element> Pooled<T> {
    /// A buffer of no pool.
    pub fn unpooled(data: Vec<T>) -> Pooled<T> {
        Pooled { data, home: Weak::new() }
    }
}

impl<T: Element> Drop for Pooled<T> {
    fn drop(&mut self) {
        if self.data.is_empty() {
            return;
        }
        if let Some(pool) = self.home.upgrade() {
            let data = std::mem::take(&mut self.data);
            let key = (TypeId::of::<T>(), data.len());
            pool.lock().entry(key).or_default().push(Box::new(data));
        }
    }
}

impl<T: Element> Deref for Pooled<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data
    }
}

impl<T: Element> DerefMut for Pooled<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}
