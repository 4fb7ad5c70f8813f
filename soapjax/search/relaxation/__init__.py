"""The cost as a sum of terms of few operators each, solved exactly: `optcnn` by elimination, `ilp` by HiGHS."""
