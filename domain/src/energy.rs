//! What of a gradient is sent.

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
