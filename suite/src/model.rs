//! The networks that are trained: layers over a batch of images, with the gradient of the mean cross-entropy.
//!
//! Parameters of all layers lie in one slice, a layer's weights before its biases; the gradient lies alike.

use flexcomm_lab::worker::{cross_entropy, recognised};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// One layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// Every input to every output; weights by rows of inputs.
    Dense {
        /// Inputs.
        inputs: usize,
        /// Outputs.
        outputs: usize,
    },
    /// Convolution of square images without padding; weights by rows of (channel, row, column) of the kernel.
    Conv {
        /// Channels in.
        channels: usize,
        /// Channels out.
        filters: usize,
        /// Rows and columns of the kernel.
        kernel: usize,
        /// Rows and columns of the image.
        side: usize,
    },
    /// Negative values become 0.
    Relu,
    /// The largest of each two by two values.
    Pool {
        /// Channels.
        channels: usize,
        /// Rows and columns of the image; even.
        side: usize,
    },
}

/// Rows and columns of a layer's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Inputs of each output.
    pub rows: usize,
    /// Outputs, each with a bias.
    pub cols: usize,
}

impl Layer {
    /// Its weights; none without parameters.
    pub fn weights(&self) -> Option<Matrix> {
        match *self {
            Self::Dense { inputs, outputs } => Some(Matrix { rows: inputs, cols: outputs }),
            Self::Conv { channels, filters, kernel, .. } => {
                Some(Matrix { rows: channels * kernel * kernel, cols: filters })
            }
            Self::Relu | Self::Pool { .. } => None,
        }
    }

    /// Values of its parameters.
    pub fn parameters(&self) -> usize {
        self.weights().map_or(0, |matrix| (matrix.rows + 1) * matrix.cols)
    }

    /// Values of an output, of so many inputs.
    fn outputs(&self, inputs: usize) -> usize {
        match *self {
            Self::Dense { outputs, .. } => outputs,
            Self::Conv { filters, kernel, side, .. } => filters * (side - kernel + 1) * (side - kernel + 1),
            Self::Relu => inputs,
            Self::Pool { channels, side } => channels * (side / 2) * (side / 2),
        }
    }
}

/// A network with the buffers of a batch. Images of a convolution lie by pixel, channels side by side.
#[derive(Debug, Clone)]
pub struct Network {
    layers: Vec<Layer>,
    inputs: usize,
    /// Of each layer's inputs, and of the outputs at last: batch x values.
    values: Vec<Vec<f32>>,
    deltas: Vec<Vec<f32>>,
    /// A convolution's patches, by layer.
    patches: Vec<Vec<f32>>,
    spare: Vec<f32>,
}

fn matrix(values: &[f32], rows: usize, cols: usize) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((rows, cols), values).unwrap_or_else(|_| unreachable!("buffers have the layer's sizes"))
}

fn matrix_mut(values: &mut [f32], rows: usize, cols: usize) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((rows, cols), values).unwrap_or_else(|_| unreachable!("buffers have the layer's sizes"))
}

impl Network {
    /// Of layers whose sizes fit.
    pub fn new(inputs: usize, layers: Vec<Layer>) -> Self {
        let count = layers.len();
        Self {
            layers,
            inputs,
            values: vec![Vec::new(); count + 1],
            deltas: vec![Vec::new(); count + 1],
            patches: vec![Vec::new(); count],
            spare: Vec::new(),
        }
    }

    /// The lab's perceptron: 784-256-128-10.
    pub fn perceptron() -> Self {
        let dense = |inputs, outputs| Layer::Dense { inputs, outputs };
        let layers = vec![dense(784, 256), Layer::Relu, dense(256, 128), Layer::Relu, dense(128, 10)];
        Self::new(784, layers)
    }

    /// Two convolutions of five by five with pooling, two dense layers.
    pub fn convolutional() -> Self {
        let conv = |channels, filters, side| Layer::Conv { channels, filters, kernel: 5, side };
        let layers = vec![
            conv(1, 4, 28),
            Layer::Relu,
            Layer::Pool { channels: 4, side: 24 },
            conv(4, 12, 12),
            Layer::Relu,
            Layer::Pool { channels: 12, side: 8 },
            Layer::Dense { inputs: 192, outputs: 64 },
            Layer::Relu,
            Layer::Dense { inputs: 64, outputs: 10 },
        ];
        Self::new(784, layers)
    }

    /// Its layers.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Values of all parameters.
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(Layer::parameters).sum()
    }

    /// Uniform weights of variance 2 / inputs (He et al. 2015), biases 0.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut parameters = Vec::with_capacity(self.parameters());
        for matrix in self.layers.iter().filter_map(Layer::weights) {
            let bound = (6.0 / matrix.rows as f32).sqrt();
            parameters.extend((0..matrix.rows * matrix.cols).map(|_| rng.random_range(-bound..bound)));
            parameters.extend(std::iter::repeat_n(0.0, matrix.cols));
        }
        parameters
    }

    /// Loads a batch: images one after the other.
    pub fn input(&mut self) -> &mut Vec<f32> {
        &mut self.values[0]
    }

    fn batch(&self) -> usize {
        self.values[0].len() / self.inputs
    }

    fn forward(&mut self, parameters: &[f32]) {
        let (batch, mut at, mut size) = (self.batch(), 0, self.inputs);
        for (index, layer) in self.layers.iter().enumerate() {
            let (before, after) = self.values.split_at_mut(index + 1);
            let (input, output) = (&before[index], &mut after[0]);
            let outputs = layer.outputs(size);
            output.clear();
            let own = &parameters[at..at + layer.parameters()];
            match *layer {
                Layer::Dense { inputs, outputs } => affine(input, own, (batch, inputs, outputs), output),
                Layer::Conv { channels, filters, kernel, side } => {
                    let patches = &mut self.patches[index];
                    let image = Image { channels, kernel, side };
                    image.cut(input, patches);
                    affine(patches, own, (batch * image.places(), image.patch(), filters), output);
                }
                Layer::Relu => output.extend(input.iter().map(|x| x.max(0.0))),
                Layer::Pool { channels, side } => pool(input, channels, side, output),
            }
            (at, size) = (at + layer.parameters(), outputs);
        }
    }

    /// Of the loaded batch; leaves the deltas of the outputs.
    fn loss(&mut self, labels: &[u8]) -> f32 {
        let last = self.layers.len();
        cross_entropy(&self.values[last], labels, &mut self.deltas[last])
    }

    /// The mean loss of the loaded batch, and how many of it are recognised.
    pub fn evaluate(&mut self, parameters: &[f32], labels: &[u8]) -> Evaluated {
        self.forward(parameters);
        let loss = self.loss(labels);
        let correct = recognised(&self.values[self.layers.len()], labels);
        Evaluated { loss, correct }
    }

    /// Writes the gradient of the loaded batch's mean loss; answers that loss.
    pub fn gradient(&mut self, parameters: &[f32], labels: &[u8], gradient: &mut [f32]) -> f32 {
        self.forward(parameters);
        let loss = self.loss(labels);
        let (batch, mut end) = (self.batch(), self.parameters());
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let start = end - layer.parameters();
            let (own, slope) = (&parameters[start..end], &mut gradient[start..end]);
            let (below, above) = self.deltas.split_at_mut(index + 1);
            let (below, above) = (&mut below[index], &above[0]);
            let input = &self.values[index];
            below.clear();
            match *layer {
                Layer::Dense { inputs, outputs } => {
                    let sizes = (batch, inputs, outputs);
                    affine_slopes(input, above, sizes, slope);
                    if index > 0 {
                        affine_back(above, own, sizes, below);
                    }
                }
                Layer::Conv { channels, filters, kernel, side } => {
                    let image = Image { channels, kernel, side };
                    let sizes = (batch * image.places(), image.patch(), filters);
                    affine_slopes(&self.patches[index], above, sizes, slope);
                    if index > 0 {
                        self.spare.clear();
                        affine_back(above, own, sizes, &mut self.spare);
                        image.paste(&self.spare, batch, below);
                    }
                }
                Layer::Relu => below.extend(input.iter().zip(above).map(|(x, d)| if *x > 0.0 { *d } else { 0.0 })),
                Layer::Pool { channels, side } => pool_back(input, above, (channels, side), below),
            }
            end = start;
        }
        loss
    }
}

/// What a network makes of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluated {
    /// Mean cross-entropy.
    pub loss: f32,
    /// Images recognised.
    pub correct: usize,
}

type Sizes = (usize, usize, usize);

/// rows x inputs by inputs x outputs, and the biases.
fn affine(input: &[f32], own: &[f32], (rows, inputs, outputs): Sizes, output: &mut Vec<f32>) {
    let (weights, biases) = own.split_at(inputs * outputs);
    (0..rows).for_each(|_| output.extend_from_slice(biases));
    let product = (matrix(input, rows, inputs), matrix(weights, inputs, outputs));
    general_mat_mul(1.0, &product.0, &product.1, 1.0, &mut matrix_mut(output, rows, outputs));
}

/// Of weights and biases.
fn affine_slopes(input: &[f32], above: &[f32], (rows, inputs, outputs): Sizes, slope: &mut [f32]) {
    let (weights, biases) = slope.split_at_mut(inputs * outputs);
    let above_rows = matrix(above, rows, outputs);
    general_mat_mul(1.0, &matrix(input, rows, inputs).t(), &above_rows, 0.0, &mut matrix_mut(weights, inputs, outputs));
    biases.fill(0.0);
    for row in above.chunks_exact(outputs) {
        biases.iter_mut().zip(row).for_each(|(bias, d)| *bias += d);
    }
}

fn affine_back(above: &[f32], own: &[f32], (rows, inputs, outputs): Sizes, below: &mut Vec<f32>) {
    below.resize(rows * inputs, 0.0);
    let weights = matrix(&own[..inputs * outputs], inputs, outputs);
    general_mat_mul(1.0, &matrix(above, rows, outputs), &weights.t(), 0.0, &mut matrix_mut(below, rows, inputs));
}

/// An image of `side` by `side` pixels under a kernel.
#[derive(Clone, Copy)]
struct Image {
    channels: usize,
    kernel: usize,
    side: usize,
}

impl Image {
    fn out(self) -> usize {
        self.side - self.kernel + 1
    }

    fn places(self) -> usize {
        self.out() * self.out()
    }

    fn patch(self) -> usize {
        self.kernel * self.kernel * self.channels
    }

    /// Where each row of each patch begins in its image, in the order of patches.
    fn rows(self) -> impl Iterator<Item = usize> {
        let place = move |at: usize| (at / self.out()) * self.side + at % self.out();
        (0..self.places())
            .flat_map(move |at| (0..self.kernel).map(move |row| (place(at) + row * self.side) * self.channels))
    }

    /// The values under the kernel, for every place of every image.
    fn cut(self, images: &[f32], patches: &mut Vec<f32>) {
        patches.clear();
        let width = self.kernel * self.channels;
        for image in images.chunks_exact(self.side * self.side * self.channels) {
            self.rows().for_each(|from| patches.extend_from_slice(&image[from..from + width]));
        }
    }

    /// Adds up what [`Self::cut`] took apart.
    fn paste(self, patches: &[f32], batch: usize, images: &mut Vec<f32>) {
        let (width, size) = (self.kernel * self.channels, self.side * self.side * self.channels);
        images.resize(batch * size, 0.0);
        let whole = self.places() * self.patch();
        for (image, patches) in images.chunks_exact_mut(size).zip(patches.chunks_exact(whole)) {
            for (from, row) in self.rows().zip(patches.chunks_exact(width)) {
                image[from..from + width].iter_mut().zip(row).for_each(|(to, value)| *to += value);
            }
        }
    }
}

/// Of the two by two values at a place of the pooled image, where the first one lies.
fn pooled(channels: usize, side: usize) -> impl Iterator<Item = usize> {
    let half = side / 2;
    (0..half * half).flat_map(move |at| {
        let first = (2 * (at / half) * side + 2 * (at % half)) * channels;
        (0..channels).map(move |channel| first + channel)
    })
}

fn four(first: usize, channels: usize, side: usize) -> [usize; 4] {
    [first, first + channels, first + side * channels, first + (side + 1) * channels]
}

fn pool(input: &[f32], channels: usize, side: usize, output: &mut Vec<f32>) {
    for image in input.chunks_exact(side * side * channels) {
        let largest = |first| four(first, channels, side).map(|at| image[at]).into_iter().fold(f32::MIN, f32::max);
        output.extend(pooled(channels, side).map(largest));
    }
}

fn pool_back(input: &[f32], above: &[f32], (channels, side): (usize, usize), below: &mut Vec<f32>) {
    below.resize(input.len(), 0.0);
    let (size, out) = (side * side * channels, side * side * channels / 4);
    let images = input.chunks_exact(size).zip(below.chunks_exact_mut(size)).zip(above.chunks_exact(out));
    for ((image, below), above) in images {
        for (first, delta) in pooled(channels, side).zip(above) {
            let places = four(first, channels, side);
            let largest = places.into_iter().max_by(|a, b| image[*a].total_cmp(&image[*b])).unwrap_or(first);
            below[largest] += delta;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_slopes_of_the_loss() {
        for (mut network, least) in [(Network::perceptron(), 235_146), (Network::convolutional(), 14_318)] {
            assert_eq!(network.parameters(), least);
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let mut parameters = network.initial(2);
            parameters.iter_mut().for_each(|p| *p += 0.01);
            network.input().extend((0..4 * 784).map(|_| rng.random::<f32>()));
            let labels = [3, 1, 4, 1];
            let mut gradient = vec![0.0; parameters.len()];
            network.gradient(&parameters, &labels, &mut gradient);
            let mut start = 0;
            for layer in network.layers().to_vec() {
                let range = start..start + layer.parameters();
                start = range.end;
                let Some(steepest) = range.max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs())) else {
                    continue;
                };
                let mut at = |by: f32| {
                    let mut moved = parameters.clone();
                    moved[steepest] += by;
                    f64::from(network.evaluate(&moved, &labels).loss)
                };
                let slope = (at(1e-3) - at(-1e-3)) / 2e-3;
                let got = f64::from(gradient[steepest]);
                assert!((slope - got).abs() < 0.02 * got.abs() + 1e-3, "{layer:?}: slope {slope}, gradient {got}");
            }
        }
    }
}
