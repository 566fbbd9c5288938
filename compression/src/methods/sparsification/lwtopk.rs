//! LWTopk (seed paper of flexible communication, 2-C; GRACE's per-layer top-k): exact top-k in each layer by itself, so that
//! no layer goes without.

use super::topk;
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry =
    Entry { info: &compressors::LWTOPK, code: 67, examples: &["k=0.01", "k=3"], ..topk::ENTRY };
