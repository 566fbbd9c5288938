//! Standard normal samples, the same for every strategy and call of one program.

use std::sync::LazyLock;

/// Samples of each quantity.
pub const DRAWS: usize = 256;

/// Quantities that have samples of their own; further ones share those of the first.
const ROWS: usize = 2048;

/// [`DRAWS`] samples for each of some quantities.
#[derive(Debug)]
pub struct Draws {
    rows: Vec<f64>,
}

impl Draws {
    /// Those of this program: a decision that is made again sees the same.
    pub fn shared() -> &'static Self {
        static SHARED: LazyLock<Draws> = LazyLock::new(Draws::new);
        &SHARED
    }

    /// Latin hypercube (McKay, Beckman and Conover 1979), centred: of each quantity one sample in each of [`DRAWS`] intervals of equal probability, in random order. Means of
    /// few samples are then those of many.
    fn new() -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let quantiles: Vec<f64> = (0..DRAWS).map(|i| quantile((i as f64 + 0.5) / DRAWS as f64)).collect();
        let mut rows = Vec::with_capacity(ROWS * DRAWS);
        for _ in 0..ROWS {
            let mut row = quantiles.clone();
            for i in (1..DRAWS).rev() {
                row.swap(i, (split_mix(&mut state) % (i as u64 + 1)) as usize);
            }
            rows.extend(row);
        }
        Self { rows }
    }

    /// Those of what forward and backward take: a row that no other quantity uses.
    pub fn compute(&self) -> &[f64] {
        &self.rows[(ROWS - 1) * DRAWS..]
    }

    /// Those of one quantity.
    pub fn row(&self, of: usize) -> &[f64] {
        let at = of % (ROWS - 1) * DRAWS;
        &self.rows[at..at + DRAWS]
    }
}

/// Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The standard normal quantile, off by less than 4.5e-4 (Abramowitz and Stegun, 26.2.23): far less than the samples' own error.
fn quantile(p: f64) -> f64 {
    let tail = p.min(1.0 - p);
    let t = (-2.0 * tail.ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    let z = t - above / below;
    if p < 0.5 { -z } else { z }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_standard_normal_and_rows_are_independent() {
        let draws = Draws::shared();
        let mean = |of: &dyn Fn(usize) -> f64| (0..DRAWS).map(of).sum::<f64>() / DRAWS as f64;
        for row in 0..ROWS {
            let x = draws.row(row);
            assert!(mean(&|i| x[i]).abs() < 1e-3 && (mean(&|i| x[i] * x[i]) - 1.0).abs() < 0.02, "{row}");
            let y = draws.row(row + 1);
            assert!(mean(&|i| x[i] * y[i]).abs() < 0.3, "{row}");
        }
        assert!((quantile(0.975) - 1.96).abs() < 1e-3);
    }
}
