//! What a compressor picked.

/// Indices that ascend and lie below n, and the gradient's values there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Selection {
    pub(crate) n: usize,
    pub(crate) indices: Vec<u32>,
    pub(crate) values: Vec<f32>,
}

impl Selection {
    /// n: values of the gradient it was taken from.
    pub fn n(&self) -> usize {
        self.n
    }

    /// k.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether nothing was picked.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Ascending, all below n.
    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    /// The values at the indices.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Starts over for a gradient of n values, keeping the buffers.
    pub(crate) fn reset(&mut self, n: usize) {
        self.n = n;
        self.indices.clear();
        self.values.clear();
    }

    /// ‖g_c‖².
    pub(crate) fn energy(&self) -> f64 {
        crate::kernels::energy(&self.values)
    }
}

/// Energies of one step on one rank. Sum them over ranks before dividing: gain is a ratio of means.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Energy {
    /// ‖g_c‖²: of what was sent.
    pub sent: f64,
    /// ‖g_e‖²: of the compensated gradient.
    pub compensated: f64,
}

impl Energy {
    /// ‖g_c‖² / ‖g_e‖². A gradient of zeros loses nothing: 1. Unbiased methods, which scale up what they send, are above 1.
    pub fn ratio(&self) -> f64 {
        if self.compensated > 0.0 { self.sent / self.compensated } else { 1.0 }
    }

    /// As a share, 0 to 1, which is what decisions are made on: [`Self::ratio`], and its inverse 1/(1 + ω) of an unbiased
    /// method, whose ratio is 1 + ω in the mean.
    pub fn gain(&self) -> f64 {
        self.ratio().min(self.ratio().recip())
    }
}

impl std::ops::Add for Energy {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { sent: self.sent + other.sent, compensated: self.compensated + other.compensated }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gain_is_a_share() {
        assert_eq!(Energy { sent: 1.0, compensated: 4.0 }.gain(), 0.25);
        assert_eq!(Energy { sent: 0.0, compensated: 0.0 }.gain(), 1.0);
        let scaled_up = Energy { sent: 5.0, compensated: 4.0 };
        assert_eq!((scaled_up.ratio(), scaled_up.gain()), (1.25, 0.8));
        assert_eq!((Energy { sent: 1.0, compensated: 4.0 } + Energy { sent: 3.0, compensated: 4.0 }).gain(), 0.5);
    }
}
