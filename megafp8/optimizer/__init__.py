"""From the gradients of one step to new weights: the gradient buffer, its reduction, clipping, Adam, the schedule."""
