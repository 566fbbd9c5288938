//! One rank's compressor: memory, buffers and the step.

use crate::feedback::{CompressError, ErrorFeedback, Memory, check_length};
use crate::kernels::Kernel;
use crate::select::{self, Pass, Scratch};
use crate::{Energy, Layers, Selection};
use flexcomm_domain::spec::{CompressorSpec, Family};
use flexcomm_domain::{CompressionRatio, Invalid, Strategy};
use std::fmt;
use std::str::FromStr;

/// How [`GradientCompressor`] selects values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Compressor {
    /// Nothing is left out.
    None,
    /// Exact top-k over the fused gradient.
    TopK,
    /// Exact top-k in each layer.
    LwTopK,
    /// Top-k by threshold estimation in 25 rounds (MSTopk).
    MsTopK,
}

impl Compressor {
    /// Every one.
    pub const ALL: &'static [Self] = &[Self::None, Self::TopK, Self::LwTopK, Self::MsTopK];

    /// Its name in a [`CompressorSpec`].
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::TopK => "topk",
            Self::LwTopK => "lwtopk",
            Self::MsTopK => "mstopk",
        }
    }

    /// With the error feedback that [`GradientCompressor`] has.
    pub fn family(self) -> Family {
        self.as_str().parse().expect("each is in the table of names")
    }
}

impl fmt::Display for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Compressor {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let allowed = "one of none, topk, lwtopk, mstopk";
        let unknown = || Invalid::Text { what: "compressor", value: text.chars().take(80).collect(), allowed };
        Self::ALL.iter().copied().find(|own| own.as_str() == text).ok_or_else(unknown)
    }
}

/// A compressor with its ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Method {
    /// How values are selected.
    pub compressor: Compressor,
    /// How many of them; ignored by compressor `none`, which keeps all.
    pub cr: CompressionRatio,
}

impl Method {
    /// Both parts.
    pub const fn new(compressor: Compressor, cr: CompressionRatio) -> Self {
        Self { compressor, cr }
    }

    /// k: exactly how many of the values it sends. LWTopk keeps at least one of every layer that is not empty.
    pub fn kept(&self, layers: &Layers) -> usize {
        match self.compressor {
            Compressor::None => layers.values(),
            Compressor::LwTopK => layers.ranges().map(|r| self.cr.keep(r.len())).sum(),
            Compressor::TopK | Compressor::MsTopK => self.cr.keep(layers.values()),
        }
    }
}

impl Method {
    /// That of a strategy which [`GradientCompressor`] can run; none of any other.
    pub fn of(strategy: &Strategy) -> Option<Self> {
        Self::of_spec(strategy.spec())
    }

    /// As [`Self::of`].
    pub fn of_spec(spec: &CompressorSpec) -> Option<Self> {
        let own = Compressor::ALL.iter().find(|own| own.as_str() == spec.compressor().name)?;
        let method = Self::new(*own, spec.ratio().unwrap_or(CompressionRatio::DENSE));
        (own.family().at(method.cr).as_ref() == Ok(spec)).then_some(method)
    }
}

/// What a step picked.
#[derive(Debug, Clone, Copy)]
pub struct Compressed<'a> {
    /// Indices and error-fed values; lives in the compressor's buffers until the next step.
    pub selection: &'a Selection,
    /// For the gain.
    pub energy: Energy,
}

/// One rank's compressor for one job. All buffers are reused: after the first step with a method nothing is allocated.
#[derive(Debug)]
pub struct GradientCompressor {
    layers: Layers,
    kernel: Kernel,
    feedback: ErrorFeedback,
    scratch: Scratch,
    selection: Selection,
}

impl GradientCompressor {
    /// With an empty memory and the fastest kernel of this machine.
    pub fn new(layers: Layers) -> Self {
        Self::with_kernel(layers, Kernel::best())
    }

    /// With a given kernel; see [`Kernel::available`].
    pub fn with_kernel(layers: Layers, kernel: Kernel) -> Self {
        let feedback = ErrorFeedback::new(layers.values());
        Self { layers, kernel, feedback, scratch: Scratch::default(), selection: Selection::default() }
    }

    /// The layers it was made for.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// Error feedback, selection and residual update: what it answers counts as sent. `seed` is MSTopk's
    /// only randomness; give each step (and rank) its own.
    pub fn compress(&mut self, method: Method, gradient: &[f32], seed: u64) -> Result<Compressed<'_>, CompressError> {
        let energy = self.pick(method, gradient, seed)?;
        self.feedback.take_selected(&self.selection)?;
        Ok(Compressed { selection: &self.selection, energy })
    }

    /// As [`Self::compress`], but nothing counts as sent before [`Self::take_at`].
    pub fn select(&mut self, method: Method, gradient: &[f32], seed: u64) -> Result<Compressed<'_>, CompressError> {
        let energy = self.pick(method, gradient, seed)?;
        Ok(Compressed { selection: &self.selection, energy })
    }

    /// Error feedback alone, for a rank whose own selection is not needed. Answers ‖g_e‖².
    pub fn feed(&mut self, gradient: &[f32]) -> Result<f64, CompressError> {
        let energy = self.pass(gradient, 0)?.feed_all()?;
        self.feedback.arm(energy);
        Ok(energy)
    }

    /// Takes the error-fed values at `indices` (ascending, below n), as the chosen rank broadcast them; they
    /// count as sent. Needs a gradient that was fed or selected from; on a refusal that gradient can still be taken.
    pub fn take_at(&mut self, indices: &[u32], values: &mut Vec<f32>) -> Result<Energy, CompressError> {
        self.feedback.take_at(indices, values)
    }

    /// Dense: writes gradient + residual to `out`; the residual is zero afterwards.
    pub fn take_all(&mut self, gradient: &[f32], out: &mut [f32]) -> Result<Energy, CompressError> {
        check_length("the output", self.layers.values(), out.len())?;
        self.feed(gradient)?;
        self.feedback.take_all(out)
    }

    /// Forgets a gradient that was fed and not taken; the residual stays as before it. So does feeding the next.
    pub fn abandon(&mut self) {
        self.feedback.abandon();
    }

    /// What was held back so far.
    pub fn residual(&self) -> &[f32] {
        &self.feedback.residual
    }

    /// Copies the memory. A gradient that was fed and not taken is not part of it.
    pub fn save(&self) -> Memory {
        let mut memory = Memory::default();
        self.save_into(&mut memory);
        memory
    }

    /// As [`Self::save`], into a buffer that exists.
    pub fn save_into(&self, memory: &mut Memory) {
        self.feedback.save_into(memory);
    }

    /// Puts a saved memory back, bit for bit. Refuses another length and values that are not finite.
    pub fn restore(&mut self, memory: &Memory) -> Result<(), CompressError> {
        self.feedback.restore(memory)
    }

    fn pass<'a>(&'a mut self, gradient: &'a [f32], seed: u64) -> Result<Pass<'a>, CompressError> {
        self.feedback.abandon();
        check_length("it", self.layers.values(), gradient.len())?;
        Ok(Pass {
            kernel: self.kernel,
            layers: &self.layers,
            gradient,
            residual: &self.feedback.residual,
            fed: &mut self.feedback.fed,
            scratch: &mut self.scratch,
            selection: &mut self.selection,
            seed,
        })
    }

    fn pick(&mut self, method: Method, gradient: &[f32], seed: u64) -> Result<Energy, CompressError> {
        let mut pass = self.pass(gradient, seed)?;
        pass.selection.reset(gradient.len());
        let fed = select::of(method.compressor).select(method.cr, &mut pass)?;
        self.feedback.arm(fed);
        Ok(Energy { sent: self.selection.energy(), fed })
    }
}
