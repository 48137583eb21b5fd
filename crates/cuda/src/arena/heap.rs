//! Which bytes of an address range are in use: best fit with splitting and coalescing. Knows no device.

use std::collections::{BTreeMap, BTreeSet};

/// Free blocks of the range `0..end`.
#[derive(Default)]
pub struct Heap {
    end: usize,
    /// Size by offset.
    by_offset: BTreeMap<usize, usize>,
    /// (size, offset).
    by_size: BTreeSet<(usize, usize)>,
}

impl Heap {
    /// First byte after the range.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Takes the smallest free block that fits, at its lowest offset.
    pub fn take(&mut self, size: usize) -> Option<usize> {
        let &(found, offset) = self.by_size.range((size, 0)..).next()?;
        self.remove(offset, found);
        if found > size {
            self.insert(offset + size, found - size);
        }
        Some(offset)
    }

    /// Gives a block back.
    pub fn give(&mut self, offset: usize, size: usize) {
        let (mut offset, mut size) = (offset, size);
        if let Some((&before, &length)) = self.by_offset.range(..offset).next_back()
            && before + length == offset
        {
            self.remove(before, length);
            offset = before;
            size += length;
        }
        if let Some(&length) = self.by_offset.get(&(offset + size)) {
            self.remove(offset + size, length);
            size += length;
        }
        self.insert(offset, size);
    }

    /// Extends the range by free bytes.
    pub fn grow(&mut self, bytes: usize) {
        let at = self.end;
        self.end += bytes;
        self.give(at, bytes);
    }

    /// Free bytes at the very end of the range.
    pub fn tail(&self) -> usize {
        self.by_offset.iter().next_back().filter(|(o, s)| *o + *s == self.end).map_or(0, |(_, s)| *s)
    }

    /// Largest free block.
    pub fn largest(&self) -> usize {
        self.by_size.iter().next_back().map_or(0, |(size, _)| *size)
    }

    fn insert(&mut self, offset: usize, size: usize) {
        self.by_offset.insert(offset, size);
        self.by_size.insert((size, offset));
    }

    fn remove(&mut self, offset: usize, size: usize) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(size, offset));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the order of takes and gives: blocks never overlap, nothing is lost, neighbours coalesce.
        #[test]
        fn blocks_stay_apart(ops in prop::collection::vec((any::<bool>(), 1usize..50, any::<prop::sample::Index>()), 1..200)) {
            let mut heap = Heap::default();
            heap.grow(600);
            let mut held: Vec<(usize, usize)> = vec![];
            for (take, size, which) in ops {
                if take || held.is_empty() {
                    if let Some(at) = heap.take(size) {
                        prop_assert!(at + size <= heap.end());
                        prop_assert!(held.iter().all(|(o, s)| at + size <= *o || o + s <= at));
                        held.push((at, size));
                    } else {
                        prop_assert!(heap.largest() < size);
                    }
                } else {
                    let (at, size) = held.swap_remove(which.index(held.len()));
                    heap.give(at, size);
                }
                prop_assert_eq!(heap.by_offset.values().sum::<usize>() + held.iter().map(|h| h.1).sum::<usize>(), heap.end());
            }
            for (at, size) in held {
                heap.give(at, size);
            }
            prop_assert_eq!(heap.largest(), 600);
            prop_assert_eq!(heap.tail(), 600);
        }
    }

    #[test]
    fn best_fit_and_growth() {
        let mut heap = Heap::default();
        assert_eq!(heap.take(1), None);
        heap.grow(100);
        let (a, b, c) = (heap.take(30), heap.take(10), heap.take(60));
        assert_eq!((a, b, c), (Some(0), Some(30), Some(40)));
        heap.give(0, 30);
        heap.give(40, 60);
        assert_eq!(heap.take(30), Some(0), "the tighter block wins");
        heap.grow(50);
        assert_eq!(heap.tail(), 110);
        assert_eq!(heap.take(110), Some(40));
    }
}
