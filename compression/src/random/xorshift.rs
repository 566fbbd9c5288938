//! BytePS's generator.

/// xorshift128+ as BytePS's code has it, with its known values pinned. No codec here draws from it: theirs are counter-based
/// ([`super::Stream`]), so that ranks and restarts agree without a state. It is for those who compare messages of BytePS's
/// random-k and dithering with ours, draw by draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Xorshift128Plus {
    state: [u64; 2],
}

impl Xorshift128Plus {
    /// Both words of the state are the seed.
    pub const fn new(seed: u64) -> Self {
        Self { state: [seed; 2] }
    }

    /// From a state that was saved.
    pub const fn from_state(state: [u64; 2]) -> Self {
        Self { state }
    }

    /// To save.
    pub const fn state(self) -> [u64; 2] {
        self.state
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        let [mut t, s] = self.state;
        t ^= t << 23;
        t ^= t >> 17;
        t ^= s ^ (s >> 26);
        self.state = [s, t];
        t.wrapping_add(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        let mut rng = Xorshift128Plus::new(2020);
        let got: [u64; 4] = std::array::from_fn(|_| rng.next());
        assert_eq!(got, [0x3_f202_00e4, 0x3_f202_0018, 0x01f9_0003_f27e_4e30, 0x03f2_0003_f2bd_ce14]);
    }
}
