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
