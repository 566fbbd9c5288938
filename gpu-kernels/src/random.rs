//! The key of the CPU side's random numbers (`flexcomm_compression::random`): number i of a stream is a function of
//! (seed, step, tensor, purpose, rank, i), so a kernel needs nothing but the key.

use flexcomm_compression::random::philox;

/// What tells a rank's stream apart from every other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Random {
    /// Of the job.
    pub seed: u64,
    /// Counts up.
    pub step: u64,
    /// Which tensor of the job.
    pub tensor: u32,
    /// Of this process; none for numbers that all ranks share.
    pub rank: Option<u32>,
}

/// `randomk`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomK {
    /// How many values.
    pub k: u64,
    /// Whether they are multiplied by n/k: unbiased.
    pub scaled: bool,
    /// Of this step; without a rank all ranks draw the same indices.
    pub random: Random,
}

impl RandomK {
    /// Whether all ranks draw the same indices, which then do not travel.
    pub fn is_shared(&self) -> bool {
        self.random.rank.is_none()
    }

    /// What values are multiplied by.
    pub(crate) fn factor(&self, n: u64) -> f32 {
        if self.scaled && self.k > 0 { (n as f64 / self.k as f64) as f32 } else { 1.0 }
    }
}

impl Random {
    /// The stream's key. `purpose` tells the streams of one method apart.
    pub(crate) fn key(self, purpose: u32) -> [u32; 4] {
        let rank = self.rank.map_or(u64::MAX, u64::from);
        let words = [self.step, u64::from(self.tensor), u64::from(purpose), rank];
        let mut state = [0u32; 4];
        let mut key = halves(self.seed);
        for pair in words.as_chunks::<2>().0 {
            let ([a, b], [c, d]) = (halves(pair[0]), halves(pair[1]));
            let counter = [a ^ state[0], b ^ state[1], c ^ state[2], d ^ state[3]];
            state = philox(counter, key);
            key = [key[0] ^ state[1], key[1] ^ state[3]];
        }
        state
    }

    /// Words of [`Self::key`] that make number i: the fourth shows in blocks.
    pub(crate) fn stream(self, purpose: u32) -> [u32; 3] {
        let [a, b, c, _] = self.key(purpose);
        [a, b, c]
    }
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_compression::codec::Context;
    use proptest::prelude::*;

    proptest! {
        /// Three words of the key make number i; the fourth shows in blocks.
        #[test]
        fn keys_are_those_of_the_cpu_side(seed: u64, step: u64, tensor: u32, rank: u32, purpose: u32, i: u32) {
            let context = Context { step, tensor, rank, ..Context::new(seed) };
            for (rank, stream) in [(Some(rank), context.own(purpose)), (None, context.shared(purpose))] {
                let key = Random { seed, step, tensor, rank }.key(purpose);
                prop_assert_eq!(philox([i, 0, key[2], key[3]], [key[0], key[1]]), stream.block(u64::from(i)));
            }
        }
    }
}
