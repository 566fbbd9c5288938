//! Going back by one step without a copy of the residual: memories and momenta swap the buffers of a step, and the
//! old ones lie in its scratch until the next.

use super::{Pipeline, StateError};
use crate::momentum::Momentum;
use crate::wire::{Reader, Writer};

/// Where the pipeline is, seen from its mark.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum At {
    /// There is none, or a second step has begun after it.
    #[default]
    Nowhere,
    /// No step has been done since.
    Before,
    /// One has.
    After,
}

/// What a step changes and swaps nothing for.
#[derive(Debug, Default)]
pub(super) struct Mark {
    at: At,
    learning_rate: f64,
    rate_assumed: bool,
    last: Option<u64>,
    skipped: u64,
    /// Held back by a memory that is gone, and used up by the step.
    leftover: Vec<f32>,
    /// States of the codecs that have one.
    codecs: Writer,
}

impl Pipeline {
    /// Marks the place that [`Self::undo`] goes back to. Costs a copy of the codecs' own states, where they have one.
    pub fn mark(&mut self) {
        let Self { mark, units, .. } = self;
        mark.at = At::Before;
        (mark.learning_rate, mark.rate_assumed) = (self.learning_rate, self.rate_assumed);
        (mark.last, mark.skipped) = (self.last, self.skipped);
        mark.codecs.clear();
        units.iter().for_each(|unit| unit.codec.save(&mut mark.codecs));
    }

    /// Everything becomes what it was at the mark, bit for bit, whatever became of the one step after it: refused, begun,
    /// done, its messages read. The mark stays.
    ///
    /// # Errors
    /// There is no mark: none was set, or it was forgotten by a second step, a change of the strategy or the rate, or a restored state.
    pub fn undo(&mut self) -> Result<(), StateError> {
        let Self { mark, units, momentum, memory, compensated, .. } = self;
        if mark.at == At::Nowhere {
            return Err(StateError::NoMark);
        }
        if mark.at == At::After {
            momentum.iter_mut().for_each(Momentum::undo);
            memory.iter_mut().for_each(|memory| memory.undo(compensated));
            std::mem::swap(&mut self.leftover, &mut mark.leftover);
            mark.at = At::Before;
        }
        (self.learning_rate, self.rate_assumed) = (mark.learning_rate, mark.rate_assumed);
        (self.last, self.skipped) = (mark.last, mark.skipped);
        self.open = None;
        // Last: a codec that refuses must not keep the gradients that memory and momentum have from going back.
        let mut from = Reader::new(mark.codecs.bytes());
        units.iter_mut().try_for_each(|unit| unit.codec.restore(&mut from))?;
        Ok(())
    }

    /// A step begins. The buffers before the last one are its scratch.
    pub(super) fn pass_mark(&mut self) {
        if self.mark.at == At::After {
            self.forget_mark();
        }
    }

    /// A step is done: the buffers before it are scratch now, and what was left over is used up.
    pub(super) fn leave_mark(&mut self) {
        if self.mark.at == At::Before {
            self.mark.at = At::After;
        }
        std::mem::swap(&mut self.leftover, &mut self.mark.leftover);
        self.leftover.clear();
    }

    /// Buffers are others from here on.
    pub(super) fn forget_mark(&mut self) {
        self.mark.at = At::Nowhere;
    }
}

#[cfg(test)]
mod tests {
    use crate::Layers;
    use crate::codec::Shape;
    use crate::pipeline::{Gradient, Member, Pipeline, Step};
    use crate::wire::Writer;

    #[test]
    fn a_codec_that_refuses_keeps_nothing_else_from_going_back() {
        let layers = Layers::matrices(&[Shape { rows: 4, cols: 6 }]).unwrap();
        let mut pipeline = Pipeline::new(&"signum(delta=0.5)+ef(vanilla)".parse().unwrap(), layers, Member::alone(0));
        let gradient: Vec<f32> = (0..24u8).map(|value| f32::from(value) - 7.0).collect();
        let step = |pipeline: &mut Pipeline, index| {
            let step = Step { index, learning_rate: 0.1 };
            pipeline.compress(Gradient::F32(&gradient), step, &mut Writer::new()).unwrap();
        };
        step(&mut pipeline, 0);
        let before = (pipeline.residual(), pipeline.last_step());
        pipeline.mark();
        step(&mut pipeline, 1);
        assert_ne!((pipeline.residual(), pipeline.last_step()), before);
        // Cut short, as no codec writes it.
        pipeline.mark.codecs.clear();
        pipeline.undo().unwrap_err();
        assert_eq!((pipeline.residual(), pipeline.last_step()), before);
    }
}
