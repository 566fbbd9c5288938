//! Closed forms of the Hockney alpha-beta model (the paper's Table I) for allgather and broadcast, where they are exact; an
//! allreduce's is that of its schedule ([`flexcomm_collectives::Allreduce`]). Which counts when is in [`crate::terms`]. The paper's other forms are what tests compare predictions with
//! (`cost/tests.rs`). Logarithms are base 2.

/// A uniform network: every pair of `n` workers is joined by the same link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Net {
    /// One-way latency in seconds.
    pub alpha: f64,
    /// Inverse bandwidth in seconds per byte.
    pub beta: f64,
    /// N, workers.
    pub n: usize,
}

impl Net {
    /// log2 N; 0 for one worker.
    pub fn log(self) -> f64 {
        (self.n.max(1) as f64).log2()
    }

    fn others(self) -> f64 {
        self.n.saturating_sub(1) as f64
    }
}

/// Broadcast: a·log N + log N·M·b. Seconds for `m` bytes.
pub fn broadcast(net: Net, m: f64) -> f64 {
    net.log() * (net.alpha + m * net.beta)
}

/// Allgather of `m` bytes from each worker: a·log N + (N-1)·M·b. Seconds.
pub fn allgather(net: Net, m: f64) -> f64 {
    net.alpha * net.log() + net.others() * m * net.beta
}

#[cfg(test)]
pub(crate) mod tests;
