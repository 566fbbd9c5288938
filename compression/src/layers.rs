//! Where the layers lie in the fused gradient.

use crate::codec::Shape;
use flexcomm_domain::spec::MAX_VALUES;
use std::ops::Range;

/// Failed to lay out a fused gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("lay out a gradient of more than {MAX_VALUES} values (layer {layer} ends beyond)")]
pub struct LayersError {
    /// The first layer that does not fit.
    pub layer: usize,
}

/// The layers of a fused gradient, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers {
    /// Where each layer ends.
    ends: Vec<usize>,
    /// Values per row of each layer as a matrix; 1 for vectors. Divides the layer's length.
    cols: Vec<usize>,
}

impl Layers {
    /// From the layers' lengths in values. Layers may be empty, the gradient too.
    pub fn new(lengths: &[usize]) -> Result<Self, LayersError> {
        let mut end = 0usize;
        let mut ends = Vec::with_capacity(lengths.len());
        for (layer, length) in lengths.iter().enumerate() {
            end = end.checked_add(*length).filter(|end| *end <= MAX_VALUES).ok_or(LayersError { layer })?;
            ends.push(end);
        }
        Ok(Self { ends, cols: vec![1; lengths.len()] })
    }

    /// From the layers' shapes, for methods that see matrices.
    pub fn matrices(shapes: &[Shape]) -> Result<Self, LayersError> {
        let length = |shape: &Shape| shape.rows.saturating_mul(shape.cols);
        let layers = Self::new(&shapes.iter().map(length).collect::<Vec<_>>())?;
        Ok(Self { cols: shapes.iter().map(|shape| shape.cols.max(1)).collect(), ..layers })
    }

    /// One layer of n values.
    pub fn fused(n: usize) -> Result<Self, LayersError> {
        Self::new(&[n])
    }

    /// As many layers, without values.
    pub fn emptied(&self) -> Self {
        Self { ends: vec![0; self.len()], cols: vec![1; self.len()] }
    }

    /// n: values of all layers together.
    pub fn values(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// How many layers.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Each layer's place in the fused gradient.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(self.ends.iter().copied()).map(|(start, end)| start..end)
    }

    /// Each layer's shape.
    pub fn shapes(&self) -> impl Iterator<Item = Shape> {
        self.ranges().zip(&self.cols).map(|(range, cols)| Shape { rows: range.len() / cols, cols: *cols })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_touch_and_cover() {
        let layers = Layers::new(&[3, 0, 5]).unwrap();
        assert_eq!(layers.ranges().collect::<Vec<_>>(), [0..3, 3..3, 3..8]);
        assert_eq!((layers.values(), layers.len()), (8, 3));
        assert_eq!(Layers::new(&[]).unwrap().values(), 0);
    }

    #[test]
    fn too_many_values_are_refused_without_overflow() {
        assert_eq!(Layers::new(&[1, MAX_VALUES]), Err(LayersError { layer: 1 }));
        assert_eq!(Layers::new(&[1, usize::MAX, 1]), Err(LayersError { layer: 1 }));
        assert!(Layers::fused(MAX_VALUES).is_ok());
    }
}
