//! The oracle: each selection as its definition says it, by sorting and counting. For tests and benches.

use super::mstopk::random_start;

/// Indices of the k largest magnitudes, ties to the lowest index, ascending.
pub fn topk(values: &[f32], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    order.sort_by(|a, b| values[*b as usize].abs().total_cmp(&values[*a as usize].abs()).then(a.cmp(b)));
    order.truncate(k);
    order.sort_unstable();
    order
}

/// [`topk`] in each layer by itself, with that layer's k.
pub fn lwtopk(values: &[f32], layers: &[(usize, usize)]) -> Vec<u32> {
    let mut start = 0;
    let mut out = Vec::new();
    for (length, k) in layers {
        let part = topk(&values[start..start + length], *k);
        out.extend(part.into_iter().map(|i| i + start as u32));
        start += length;
    }
    out
}

/// MSTopk by counting in each of its 25 rounds, as published.
pub fn mstopk(values: &[f32], k: usize, seed: u64) -> Vec<u32> {
    let magnitudes: Vec<f32> = values.iter().map(|x| x.abs()).collect();
    if k >= magnitudes.len() {
        return (0..magnitudes.len() as u32).collect();
    }
    let max = magnitudes.iter().copied().fold(0.0, f32::max);
    let mean = super::mstopk::mean_magnitude(values);
    let (mut left, mut right) = (0.0, 1.0);
    let (mut most, mut fewest) = (0, magnitudes.len());
    let (mut upper, mut lower) = (f32::INFINITY, 0.0);
    for _ in 0..25 {
        let ratio = left + (right - left) / 2.0;
        let threshold = (mean + ratio * (f64::from(max) - mean)) as f32;
        let count = magnitudes.iter().filter(|m| **m >= threshold).count();
        if count <= k {
            right = ratio;
            if count > most {
                (most, upper) = (count, threshold);
            }
        } else {
            left = ratio;
            if count < fewest {
                (fewest, lower) = (count, threshold);
            }
        }
    }
    let all = 0..magnitudes.len() as u32;
    let (sure, band): (Vec<u32>, Vec<u32>) =
        all.filter(|i| magnitudes[*i as usize] >= lower).partition(|i| magnitudes[*i as usize] >= upper);
    let missing = k - sure.len();
    let start = random_start(seed, band.len(), missing);
    let mut out = sure;
    out.extend_from_slice(&band[start..start + missing]);
    out.sort_unstable();
    out
}
