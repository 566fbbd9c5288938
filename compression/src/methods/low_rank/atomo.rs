//! Spectral ATOMO (Wang et al. 2018): atoms of the singular value decomposition, kept at random, so that the mean is M.
//!
//! M = Σ σ_i u_i v_iᵀ; atom i is sent with probability p_i, divided by p_i. Algorithm 1 gives the p of least variance for a
//! budget s = Σ p_i: p_i = min(1, s σ_i / Σ σ_j) with what the largest leave over spread on the others.
//!
//! Atoms are drawn together, by one uniform number that cuts the sums of p at whole steps (systematic sampling; Madow and
//! Madow 1944): each has its p_i, which with orthogonal atoms is all that mean and variance depend on, and ⌊s⌋ or ⌈s⌉ are
//! sent. Drawn one by one there may be any number, and messages longer than the matrix; a budget whose ⌈s⌉ atoms are not
//! shorter than the matrix sends the matrix.
//!
//! The decomposition is that of the smaller Gram matrix in f64. For the tall case MᵀM = V Λ Vᵀ, atom i is (M v_i) v_iᵀ,
//! which needs no division by σ_i; wide matrices alike from M Mᵀ. Its cost grows with min(m, L)²·n: this is the slowest of
//! all compressors by its definition. Singular values below about 1e-8 of the largest count as zero.
//!
//! Payload: one byte, 1 for values as they are (f32; vectors, matrices with too large values for f32 once divided, and
//! budgets of full rank), 0 for atoms: their count, u32; then each: m values, L values, f32; the atom is their outer product.

use super::eigen::Eigen;
use super::matrix::{AddProduct, Strides, Times, Transposed, dot64};
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::kernels::Work;
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ATOMO,
    code: 146,
    examples: &["budget=3", "budget=0.7", "budget=1000"],
    build: |values, shape| Box::new(Atomo::new(values.number(0), shape)),
};

const ATOMS: u8 = 0;
const AS_IT_IS: u8 = 1;

#[derive(Debug)]
struct Atomo {
    shape: Shape,
    budget: f64,
    eigen: Eigen,
    sigma: Vec<f64>,
    chances: Vec<f64>,
    drawn: Vec<usize>,
    left: Vec<f32>,
    right: Vec<f32>,
}

impl Atomo {
    fn new(budget: f64, shape: Shape) -> Self {
        let (eigen, sigma, chances, drawn, left, right) = Default::default();
        let mut atomo = Self { shape, budget, eigen, sigma, chances, drawn, left, right };
        if !atomo.always_whole() {
            // How many atoms there are changes from step to step.
            let most = atomo.most();
            atomo.drawn.reserve(most);
            atomo.left.reserve(most * shape.rows);
            atomo.right.reserve(most * shape.cols);
        }
        atomo
    }

    /// The smaller side: how many atoms there are.
    fn atoms(&self) -> usize {
        self.shape.rows.min(self.shape.cols)
    }

    /// How many atoms are sent at most.
    fn most(&self) -> usize {
        (self.budget.ceil().min(self.atoms() as f64)) as usize
    }

    /// Bytes of a payload of so many atoms.
    fn bytes(&self, atoms: usize) -> usize {
        5 + 4 * atoms * (self.shape.rows + self.shape.cols)
    }

    /// Bytes of a payload of all values.
    fn whole_bytes(&self) -> usize {
        1 + 4 * self.shape.values()
    }

    fn always_whole(&self) -> bool {
        !self.shape.is_matrix() || self.bytes(self.most()) >= self.whole_bytes()
    }

    /// Singular values into `sigma`, from the largest on.
    fn decompose(&mut self, x: &[f32], context: &Context) {
        let (k, cols) = (self.atoms(), self.shape.cols);
        let gram = self.eigen.reset(k);
        match self.shape.rows >= cols {
            true => context.kernel.run(TallGram { matrix: x, cols, gram }),
            false => context.kernel.run(WideGram { matrix: x, cols, gram }),
        }
        self.eigen.solve(context.kernel);
        let Eigen { values, order, .. } = &self.eigen;
        self.sigma.clear();
        self.sigma.extend(order.iter().map(|i| values[*i as usize].max(0.0).sqrt()));
    }

    /// Atom i over p, as two vectors.
    fn make_atom(&mut self, i: usize, x: &[f32], context: &Context) {
        let Self { shape: Shape { rows, cols }, eigen, chances, left, right, .. } = self;
        let (rows, cols, tall) = (*rows, *cols, *rows >= *cols);
        left.resize(rows, 0.0);
        right.resize(cols, 0.0);
        // The unit vector goes with entries around 1, the other without the factor: no entry leaves f32's range.
        let spread = (eigen.values.len() as f64).sqrt();
        let unit: &mut [f32] = if tall { right } else { left };
        unit.iter_mut().zip(eigen.vector(i)).for_each(|(to, v)| *to = (v / spread / chances[i]) as f32);
        let strides = Strides::vectors(rows);
        match tall {
            true => context.kernel.run(Times { matrix: x, cols, right, to: left, strides }),
            false => context.kernel.run(Transposed { matrix: x, cols, left, to: right }),
        }
        let unit: &mut [f32] = if tall { right } else { left };
        unit.iter_mut().zip(eigen.vector(i)).for_each(|(to, v)| *to = (v * spread) as f32);
    }

    fn encode_whole(x: &[f32], compensated: f64, out: &mut Writer) -> Energy {
        out.u8(AS_IT_IS);
        out.f32s(x);
        Energy { sent: compensated, compensated }
    }

    /// Whether an atom over its probability might leave f32: then nothing is left out.
    fn too_large(&self) -> bool {
        let sum: f64 = self.sigma.iter().sum();
        sum / self.budget.min(1.0) * self.atoms() as f64 > f64::from(f32::MAX)
    }
}

/// Algorithm 1: probabilities for values in descending order, of sum `budget`, or fewer values than that.
fn probabilities(sigma: &[f64], budget: f64, out: &mut Vec<f64>) {
    out.clear();
    let (mut left, mut sum) = (budget, sigma.iter().rev().sum::<f64>());
    for (i, value) in sigma.iter().enumerate() {
        if *value * left <= sum || sum <= 0.0 {
            let share = if sum > 0.0 { left / sum } else { 0.0 };
            out.extend(sigma[i..].iter().map(|value| (value * share).clamp(0.0, 1.0)));
            return;
        }
        out.push(1.0);
        left -= 1.0;
        // Again from the least on: a difference would leave rounding of the largest.
        sum = sigma[i + 1..].iter().rev().sum();
    }
}

/// Indices i with their chances: those where the sum of chances so far, shifted by a uniform number, reaches a whole one.
/// What is sure is taken apart, so that no rounding of sums can miss it; nor do they draw more than `most`.
fn draw(chances: &[f64], (uniform, most): (f64, usize), drawn: &mut Vec<usize>) {
    drawn.clear();
    let mut sum = uniform;
    for (i, chance) in chances.iter().enumerate() {
        if *chance < 1.0 {
            let before = sum.floor();
            sum += chance;
            if sum.floor() == before {
                continue;
            }
        }
        if drawn.len() < most {
            drawn.push(i);
        }
    }
}

impl Codec for Atomo {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let compensated = context.stats(x)?.energy;
        if self.always_whole() {
            return Ok(Self::encode_whole(x, compensated, out));
        }
        self.decompose(x, context);
        if self.too_large() {
            return Ok(Self::encode_whole(x, compensated, out));
        }
        let (sigma, chances) = (&self.sigma, &mut self.chances);
        probabilities(sigma, self.budget, chances);
        let most = self.budget.ceil().min(sigma.len() as f64) as usize;
        draw(chances, (context.own(0).unit(0), most), &mut self.drawn);
        out.u8(ATOMS);
        out.u32(self.drawn.len() as u32);
        let mut sent = 0.0;
        for at in 0..self.drawn.len() {
            self.make_atom(self.drawn[at], x, context);
            out.f32s(&self.left);
            out.f32s(&self.right);
            // Atoms are orthogonal to each other.
            sent += dot64(&self.left, &self.left) * dot64(&self.right, &self.right);
        }
        Ok(Energy { sent, compensated })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        let kind = from.u8("kind")?;
        if kind == AS_IT_IS {
            return from.add_f32s("values", (scale, out));
        }
        let count = from.u32("atoms")?;
        // More atoms than are sent today, too: once there were any number.
        if kind != ATOMS || !self.shape.is_matrix() || count as usize > self.atoms() {
            return Err(ReadError::field("atoms", count, "a matrix has no more than its smaller side"));
        }
        let Self { shape: Shape { rows, cols }, left, right, .. } = self;
        left.clear();
        right.clear();
        for _ in 0..count {
            left.extend(from.f32s("left vector", *rows)?);
            right.extend(from.f32s("right vector", *cols)?);
        }
        let (cols, strides) = (*cols, Strides::vectors(*rows));
        AddProduct { left, strides, right, cols, scale, out }.checked(context.kernel)
    }

    fn size(&self) -> Size {
        match self.always_whole() {
            true => Size::Exact(self.whole_bytes()),
            // Too large values go as they are.
            false => Size::AtMost(self.whole_bytes()),
        }
    }
}

/// `gram = MᵀM`.
struct TallGram<'a> {
    matrix: &'a [f32],
    cols: usize,
    gram: &'a mut [f64],
}

impl Work for TallGram<'_> {
    #[inline(always)]
    fn run(self) {
        let cols = self.cols;
        for row in self.matrix.chunks_exact(cols) {
            for (j, to) in self.gram.chunks_exact_mut(cols).enumerate() {
                let factor = f64::from(row[j]);
                to.iter_mut().zip(row).for_each(|(to, x)| *to += factor * f64::from(*x));
            }
        }
    }
}

/// `gram = M Mᵀ`.
struct WideGram<'a> {
    matrix: &'a [f32],
    cols: usize,
    gram: &'a mut [f64],
}

impl Work for WideGram<'_> {
    #[inline(always)]
    fn run(self) {
        let rows = self.matrix.len() / self.cols;
        for (i, a) in self.matrix.chunks_exact(self.cols).enumerate() {
            for (j, b) in self.matrix.chunks_exact(self.cols).enumerate().take(i + 1) {
                let mut sums = [0.0f64; 16];
                for (a, b) in a.chunks(16).zip(b.chunks(16)) {
                    for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
                        *sum += f64::from(*a) * f64::from(*b);
                    }
                }
                let sum = sums.iter().sum();
                self.gram[i * rows + j] = sum;
                self.gram[j * rows + i] = sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over all uniform numbers on a fine grid: each index as often as its chance says, and ⌊s⌋ or ⌈s⌉ of them each time.
    #[test]
    fn drawing_together_keeps_every_chance() {
        const GRID: usize = 10_000;
        for chances in [&[1.0, 0.5, 0.25, 0.25][..], &[0.9, 0.6, 0.3, 0.1, 0.1, 0.7], &[0.2, 0.1], &[1.0, 1.0], &[]] {
            let s: f64 = chances.iter().sum();
            let (least, most) = ((s + 1e-9).floor() as usize, (s - 1e-9).ceil().max(0.0) as usize);
            let (mut counts, mut drawn) = (vec![0usize; chances.len()], Vec::new());
            for at in 0..GRID {
                draw(chances, ((at as f64 + 0.5) / GRID as f64, most), &mut drawn);
                assert!((least..=most).contains(&drawn.len()), "{} of {s}", drawn.len());
                assert!(drawn.is_sorted_by(|a, b| a < b));
                drawn.iter().for_each(|i| counts[*i] += 1);
            }
            for (count, chance) in counts.iter().zip(chances) {
                assert!((*count as f64 / GRID as f64 - chance).abs() < 3.0 / GRID as f64, "{counts:?} of {chances:?}");
            }
        }
    }

    /// By hand: the largest is sure, the others share what is left of the budget.
    #[test]
    fn probabilities_by_hand() {
        let mut p = Vec::new();
        probabilities(&[4.0, 2.0, 1.0, 1.0], 1.0, &mut p);
        assert_eq!(p, [0.5, 0.25, 0.125, 0.125]);
        probabilities(&[8.0, 2.0, 1.0, 1.0], 2.0, &mut p);
        assert_eq!(p, [1.0, 0.5, 0.25, 0.25]);
        probabilities(&[3.0, 3.0, 0.0], 2.0, &mut p);
        assert_eq!(p, [1.0, 1.0, 0.0]);
        probabilities(&[0.0, 0.0], 1.0, &mut p);
        assert_eq!(p, [0.0, 0.0]);
        probabilities(&[5.0, 1.0], 7.0, &mut p);
        assert_eq!(p, [1.0, 1.0]);
    }
}
