//! [`BlockPool`]: which blocks of the KV cache are free.

/// Hands out block numbers `0..capacity`.
pub(crate) struct BlockPool {
    free: Vec<i32>,
    capacity: usize,
    block_size: usize,
}

impl BlockPool {
    /// All blocks free. `capacity` must fit an i32.
    pub fn new(capacity: usize, block_size: usize) -> BlockPool {
        BlockPool { free: (0..capacity as i32).rev().collect(), capacity, block_size }
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Tokens that all blocks together hold.
    pub fn token_capacity(&self) -> usize {
        self.capacity * self.block_size
    }

    /// Extends `table` until it holds `tokens` tokens: all that is missing, or nothing and false when too few are free.
    pub fn grow(&mut self, table: &mut Vec<i32>, tokens: usize) -> bool {
        let missing = self.blocks_for(tokens).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        table.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Takes back all blocks of a table.
    pub fn release(&mut self, table: &mut Vec<i32>) {
        self.free.extend(table.drain(..).rev());
        debug_assert!(self.free.len() <= self.capacity, "a block was released twice");
    }

    /// Cache row of position `position` of a sequence with this table.
    pub fn slot(&self, table: &[i32], position: usize) -> i32 {
        table[position / self.block_size] * self.block_size as i32 + (position % self.block_size) as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_all_or_nothing_and_takes_blocks_back() {
        let mut pool = BlockPool::new(4, 8);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.grow(&mut a, 17));
        assert_eq!((a.len(), pool.free()), (3, 1));
        assert!(pool.grow(&mut a, 24), "the third block still has room");
        assert!(!pool.grow(&mut b, 9));
        assert!(b.is_empty() && pool.free() == 1, "a refused growth takes nothing");
        pool.release(&mut a);
        assert!(pool.grow(&mut b, 32));
        b.sort_unstable();
        assert_eq!(b, [0, 1, 2, 3], "every block exists once");
    }

    #[test]
    fn slots_follow_the_table() {
        let pool = BlockPool::new(4, 8);
        assert_eq!(pool.slot(&[3, 1], 0), 24);
        assert_eq!(pool.slot(&[3, 1], 7), 31);
        assert_eq!(pool.slot(&[3, 1], 8), 8);
    }
}
