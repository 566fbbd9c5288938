//! Architectures of GPUs.

use crate::LoadError;

/// A compute capability, as 9.0 of an H100 or H200.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    major: u32,
    minor: u32,
}

/// The first that the kernels are written for: Turing. CUDA 13 compiles for no older one.
const FIRST: Arch = Arch { major: 7, minor: 5 };

impl Arch {
    /// Those that the tests compile for: Turing, Ampere, Hopper, Blackwell.
    pub const TESTED: [Self; 4] = [FIRST, Self::new(8, 0), Self::new(9, 0), Self::new(10, 0)];

    /// Unchecked; see [`Arch::check`].
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// The number in `sm_90`.
    pub const fn number(self) -> u32 {
        self.major * 10 + self.minor
    }

    /// Name of the real architecture: its code loads without the driver's compiler.
    pub fn sm(self) -> String {
        format!("sm_{}", self.number())
    }

    /// Refuses what is too old, and what this NVRTC does not know.
    pub fn check(self, known: &[u32]) -> Result<Self, LoadError> {
        if self < FIRST {
            let why = format!("the kernels need {} or newer; gradients on this GPU take the CPU path", FIRST.sm());
            return Err(LoadError::Arch { arch: self.sm(), why });
        }
        if known.contains(&self.number()) {
            return Ok(self);
        }
        Err(LoadError::Arch { arch: self.sm(), why: self.unknown(known) })
    }

    /// A newer NVRTC knows newer architectures; of older ones some know fewer than others.
    fn unknown(self, known: &[u32]) -> String {
        let most = known.iter().max().copied().unwrap_or(0);
        if self.number() > most {
            return format!("this NVRTC knows up to sm_{most}; install a newer nvidia-cuda-nvrtc");
        }
        let list: Vec<String> = known.iter().map(|number| format!("sm_{number}")).collect();
        format!("this NVRTC knows {}; install another nvidia-cuda-nvrtc, which knows it", list.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_old_and_unknown_are_told_apart() {
        let known = [75, 80, 90];
        assert_eq!(Arch::new(9, 0).check(&known).unwrap().sm(), "sm_90");
        let old = Arch::new(7, 0).check(&[70, 75]).unwrap_err().to_string();
        assert!(old.contains("sm_70") && old.contains("need sm_75"), "{old}");
        let new = Arch::new(12, 1).check(&known).unwrap_err().to_string();
        assert!(new.contains("sm_121") && new.contains("up to sm_90") && new.contains("newer"), "{new}");
        let between = Arch::new(8, 7).check(&known).unwrap_err().to_string();
        assert!(between.contains("sm_87") && between.contains("sm_75, sm_80, sm_90"), "{between}");
        assert!(between.contains("another") && !between.contains("newer"), "{between}");
    }
}
