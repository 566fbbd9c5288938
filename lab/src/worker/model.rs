//! A multilayer perceptron with ReLU and softmax cross-entropy. All parameters lie in one fused buffer,
//! weights of a layer (inputs x outputs) before its biases; gradients lie alike.

use super::data::{CLASSES, Images, PIXELS};
use flexcomm_exchange::Param;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Most parameters: 64 MiB of fp32, far more than one emulated link should carry.
pub const MAX_PARAMETERS: usize = 16 << 20;

/// The sizes of all layers, from the pixels to the classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    sizes: Vec<usize>,
}

impl Shape {
    /// With hidden layers of these sizes. None when one is empty or all together are above [`MAX_PARAMETERS`].
    pub fn new(hidden: &[usize]) -> Option<Self> {
        let mut sizes = vec![PIXELS];
        sizes.extend_from_slice(hidden);
        sizes.push(CLASSES);
        let weights = sizes.windows(2).map(|pair| pair[0].checked_mul(pair[1])?.checked_add(pair[1]));
        let total = weights.into_iter().try_fold(0usize, |sum, n| sum.checked_add(n?))?;
        (total <= MAX_PARAMETERS && !sizes.contains(&0)).then_some(Self { sizes })
    }

    /// Values of each tensor, in the order of the fused buffer.
    pub fn tensors(&self) -> Vec<usize> {
        self.sizes.windows(2).flat_map(|pair| [pair[0] * pair[1], pair[1]]).collect()
    }

    /// The tensors as parameters of a bucket: weights by rows of inputs, and biases.
    pub fn params(&self) -> Vec<Param> {
        let cols = self.sizes.windows(2).flat_map(|pair| [pair[0], 1]);
        let param = |(id, (len, cols)): (u32, (usize, usize))| Param { id, len, cols };
        (0..).zip(self.tensors().into_iter().zip(cols)).map(param).collect()
    }

    /// Values of all of them.
    pub fn parameters(&self) -> usize {
        self.tensors().iter().sum()
    }

    /// Uniform weights of variance 2 / inputs (He), biases zero. The same on every rank for the same seed.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut parameters = Vec::with_capacity(self.parameters());
        for pair in self.sizes.windows(2) {
            let bound = (6.0 / pair[0] as f32).sqrt();
            parameters.extend((0..pair[0] * pair[1]).map(|_| rng.random_range(-bound..bound)));
            parameters.extend(std::iter::repeat_n(0.0, pair[1]));
        }
        parameters
    }
}

/// Computes outputs and gradients; holds the buffers of one batch.
#[derive(Debug)]
pub struct Network {
    shape: Shape,
    /// Per layer of neurons, batch x size.
    activations: Vec<Vec<f32>>,
    deltas: Vec<Vec<f32>>,
    labels: Vec<u8>,
}

impl Network {
    /// Buffers grow with the first batch.
    pub fn new(shape: Shape) -> Self {
        let layers = shape.sizes.len();
        Self { shape, activations: vec![Vec::new(); layers], deltas: vec![Vec::new(); layers], labels: Vec::new() }
    }

    /// Loads a batch of images.
    pub fn load(&mut self, images: &Images, indices: impl Iterator<Item = usize>) {
        images.load_batch(indices, &mut self.activations[0], &mut self.labels);
    }

    fn forward(&mut self, parameters: &[f32]) {
        let mut rest = parameters;
        let last = self.shape.sizes.len() - 2;
        for (layer, pair) in self.shape.sizes.windows(2).enumerate() {
            let (weights, tail) = rest.split_at(pair[0] * pair[1]);
            let (biases, tail) = tail.split_at(pair[1]);
            rest = tail;
            let (before, after) = self.activations.split_at_mut(layer + 1);
            let (input, output) = (&before[layer], &mut after[0]);
            output.clear();
            for x in input.chunks_exact(pair[0]) {
                let start = output.len();
                output.extend_from_slice(biases);
                let y = &mut output[start..];
                for (value, row) in x.iter().zip(weights.chunks_exact(pair[1])) {
                    // Half of the pixels, and about half of the neurons, are zero.
                    if *value != 0.0 {
                        y.iter_mut().zip(row).for_each(|(y, w)| *y += value * w);
                    }
                }
            }
            if layer != last {
                output.iter_mut().for_each(|y| *y = y.max(0.0));
            }
        }
    }

    /// Of the loaded batch; leaves the last layer's deltas.
    fn loss(&mut self) -> f32 {
        let last = self.shape.sizes.len() - 1;
        cross_entropy(&self.activations[last], &self.labels, &mut self.deltas[last])
    }

    /// Writes the gradient of the loaded batch's mean loss and answers that loss.
    pub fn gradient(&mut self, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        self.forward(parameters);
        let loss = self.loss();
        gradient.fill(0.0);
        let mut end = gradient.len();
        for layer in (0..self.shape.sizes.len() - 1).rev() {
            let (inputs, outputs) = (self.shape.sizes[layer], self.shape.sizes[layer + 1]);
            let start = end - inputs * outputs - outputs;
            let (weights, biases) = gradient[start..end].split_at_mut(inputs * outputs);
            let (below, above) = self.deltas.split_at_mut(layer + 1);
            accumulate(&self.activations[layer], &above[0], weights, biases);
            if layer > 0 {
                let weights = &parameters[start..start + inputs * outputs];
                pass_back(&self.activations[layer], &above[0], inputs, weights, &mut below[layer]);
            }
            end = start;
        }
        loss
    }

    /// How many of the loaded batch's images are recognised.
    pub fn correct(&mut self, parameters: &[f32]) -> usize {
        self.forward(parameters);
        recognised(&self.activations[self.shape.sizes.len() - 1], &self.labels)
    }
}

/// Mean cross-entropy of a batch's outputs by softmax, an image's side by side; replaces `deltas` by its slopes.
pub fn cross_entropy(outputs: &[f32], labels: &[u8], deltas: &mut Vec<f32>) -> f32 {
    deltas.clear();
    let scale = 1.0 / labels.len() as f32;
    let mut loss = 0.0;
    for (y, label) in outputs.chunks_exact(outputs.len() / labels.len()).zip(labels) {
        let top = y.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = y.iter().map(|v| (v - top).exp()).sum();
        loss += sum.ln() + top - y[usize::from(*label)];
        let start = deltas.len();
        deltas.extend(y.iter().map(|v| (v - top).exp() / sum * scale));
        deltas[start + usize::from(*label)] -= scale;
    }
    loss * scale
}

/// How many of a batch's outputs are largest at their label.
pub fn recognised(outputs: &[f32], labels: &[u8]) -> usize {
    let best = |y: &[f32]| y.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i);
    let pairs = outputs.chunks_exact(outputs.len() / labels.len()).zip(labels);
    pairs.filter(|(y, label)| best(y) == Some(usize::from(**label))).count()
}

/// Adds the batch's outer products to the weights' gradient, and the deltas to the biases'.
fn accumulate(input: &[f32], delta: &[f32], weights: &mut [f32], biases: &mut [f32]) {
    let outputs = biases.len();
    let inputs = weights.len() / outputs;
    for (x, d) in input.chunks_exact(inputs).zip(delta.chunks_exact(outputs)) {
        biases.iter_mut().zip(d).for_each(|(b, d)| *b += d);
        for (value, row) in x.iter().zip(weights.chunks_exact_mut(outputs)) {
            if *value != 0.0 {
                row.iter_mut().zip(d).for_each(|(w, d)| *w += value * d);
            }
        }
    }
}

/// Deltas of the layer below: through the weights, and only where ReLU let something through.
fn pass_back(activation: &[f32], delta: &[f32], inputs: usize, weights: &[f32], below: &mut Vec<f32>) {
    let outputs = weights.len() / inputs;
    below.clear();
    for (x, d) in activation.chunks_exact(inputs).zip(delta.chunks_exact(outputs)) {
        below.extend(x.iter().zip(weights.chunks_exact(outputs)).map(
            |(value, row)| {
                if *value > 0.0 { dot(row, d) } else { 0.0 }
            },
        ));
    }
}

/// In eight lanes, so that the compiler may use vector registers without changing the order of additions.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a8.zip(b8) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        assert_eq!(Shape::new(&[256, 128]).unwrap().parameters(), 235_146);
        assert_eq!(Shape::new(&[256, 128]).unwrap().tensors(), [200_704, 256, 32_768, 128, 1280, 10]);
        assert_eq!(Shape::new(&[]).unwrap().parameters(), 7850);
        assert!(Shape::new(&[0]).is_none());
        assert!(Shape::new(&[1 << 20]).is_none());
        assert!(Shape::new(&[usize::MAX, 2]).is_none());
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let shape = Shape::new(&[12, 9]).unwrap();
        let images = Images::synthetic(6, 1);
        let mut network = Network::new(shape.clone());
        let mut parameters = shape.initial(3);
        // Biases off zero, so that their part is seen too.
        parameters.iter_mut().for_each(|p| *p += 0.01);
        let mut gradient = vec![0.0; parameters.len()];
        network.load(&images, 0..6);
        network.gradient(&parameters, &mut gradient);
        let mut at = |i: usize, by: f32| {
            let mut moved = parameters.clone();
            moved[i] += by;
            f64::from(network.gradient(&moved, &mut vec![0.0; moved.len()]))
        };
        let steepest = |range: std::ops::Range<usize>| {
            range.max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs())).unwrap()
        };
        let mut start = 0;
        for tensor in shape.tensors() {
            let i = steepest(start..start + tensor);
            let slope = (at(i, 1e-2) - at(i, -1e-2)) / 2e-2;
            let error = (slope - f64::from(gradient[i])).abs();
            assert!(error < 0.03 * slope.abs() + 1e-4, "parameter {i}: slope {slope}, gradient {}", gradient[i]);
            start += tensor;
        }
    }

    #[test]
    fn descent_recognises_images() {
        let shape = Shape::new(&[16]).unwrap();
        let images = Images::synthetic(100, 1);
        let mut network = Network::new(shape.clone());
        let mut parameters = shape.initial(3);
        let mut gradient = vec![0.0; parameters.len()];
        network.load(&images, 0..100);
        assert!(network.correct(&parameters) < 50);
        for _ in 0..60 {
            network.gradient(&parameters, &mut gradient);
            parameters.iter_mut().zip(&gradient).for_each(|(p, g)| *p -= 0.1 * g);
        }
        assert!(network.correct(&parameters) > 90);
    }
}
