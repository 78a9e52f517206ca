#!/bin/sh
sort -u fruits.txt >unique.txt
