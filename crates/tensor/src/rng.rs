//! A counter-based random generator: the value at an index does not depend on who asks for it first,
//! so initialisation and sampling are the same in every layout and on every thread count.
//!
//! SplitMix64 finaliser over (seed, stream, counter); Steele, Lea, Flood, "Fast splittable pseudorandom
//! number generators", 2014.

/// A stream of random numbers named by a seed and a stream number.
#[derive(Clone, Copy, Debug)]
pub struct Rng {
    key: u64,
    counter: u64,
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// The stream `stream` of `seed`.
    pub fn new(seed: u64, stream: u64) -> Rng {
        Rng { key: mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(stream.wrapping_add(0x632b_e59b_d9b4_e019))), counter: 0 }
    }

    /// 64 random bits at `index`, whatever was drawn before.
    pub fn at(&self, index: u64) -> u64 {
        mix(self.key ^ mix(index.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1)))
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.counter += 1;
        self.at(self.counter)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..n (n > 0).
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next_u64() as u128 * n as u128) >> 64) as usize
    }

    /// Standard normal at `index` (Box-Muller).
    pub fn normal_at(&self, index: u64) -> f64 {
        let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let (a, b) = (unit(self.at(2 * index)), unit(self.at(2 * index + 1)));
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }

    /// Shuffles in place (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
